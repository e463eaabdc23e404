"""The arithmetic and the stop-watch of the benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest
from measure import former
from measure.figures import exceeded, quantile, ratios, table


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1, 100), (0, 1)])
def test_a_quantile_is_a_value_of_the_sample(share: float, value: int) -> None:
    assert quantile(range(100, 0, -1), share) == value


def test_a_figure_above_its_limit_is_named_with_the_limit() -> None:
    [line] = exceeded({"allocate_p99_ms": 5.1})
    assert line.startswith("allocate_p99_ms is 5.1, must be at most 5")
    [row] = table({"allocate_p99_ms": 5.1})
    assert "OVER at most 5" in row


def test_a_median_is_compared_with_the_former_version_where_that_was_measured() -> None:
    figures = {"add_p50_ms": 3.0, "former_add_p50_ms": 2.0, "del_p50_ms": 1.0}
    assert ratios(figures, "add", "del") == {"add_ratio_former": 1.5}


def test_a_former_version_that_is_no_commit_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--against no-such-commit: "):
        former.build("no-such-commit", tmp_path)
    assert list(tmp_path.iterdir()) == []
