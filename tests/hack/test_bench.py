"""The arithmetic of the benchmarks."""

from __future__ import annotations

from measure.figures import exceeded, ratios, table


def test_a_figure_above_its_limit_is_named_with_the_limit() -> None:
    [line] = exceeded({"allocate_p99_ms": 5.1})
    assert line.startswith("allocate_p99_ms is 5.1, must be at most 5")
    [row] = table({"allocate_p99_ms": 5.1})
    assert "OVER at most 5" in row


def test_a_median_is_compared_with_the_former_version_where_that_was_measured() -> None:
    figures = {"add_p50_ms": 3.0, "former_add_p50_ms": 2.0, "del_p50_ms": 1.0}
    assert ratios(figures, "add", "del") == {"add_ratio_former": 1.5}
