from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.quantity import milli_text, page_size_name, parse_exact, parse_milli, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("2Gi", 2 << 30),
        ("1500M", 1_500_000_000),
        ("0.5", Decimal("0.5")),
        (".5", Decimal("0.5")),
        ("500m", Decimal("0.5")),
        ("1e3", 1000),
        ("+1E2", 100),
        ("1Ei", 1 << 60),
    ],
)
def test_quantities_are_read(text: Any, value: Any) -> None:
    assert parse_exact(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1 Gi", "1GB", "1e1000", "9" * 100, None, "Gi"])
def test_anything_else_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_exact(text)


def test_parts_are_rounded_up_as_kubernetes_does() -> None:
    assert parse_quantity("1500m") == 2
    assert parse_milli("0.0001") == 1


@given(st.integers(0, 10**9))
def test_thousandths_read_back(milli: int) -> None:
    assert parse_milli(milli_text(milli)) == milli


def test_huge_pages_are_named_as_kubelet_does() -> None:
    assert [page_size_name(size) for size in (2 << 20, 1 << 30, 64 << 10, 100)] == [
        "hugepages-2Mi",
        "hugepages-1Gi",
        "hugepages-64Ki",
        "hugepages-100",
    ]
