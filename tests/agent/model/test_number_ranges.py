"""Sets of VLAN IDs: what is read, and the one text for each."""

from __future__ import annotations

import pytest

from agent.model import number_ranges


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100", "100"),
        ("100,200-210", "100,200-210"),
        ("200-210,100", "100,200-210"),
        ("3, 1 ,2", "1-3"),
        ("5-9,1-6", "1-9"),
        ("1-9,3-4", "1-9"),
        ("1 - 3,5", "1-3,5"),
        ("4094,1", "1,4094"),
        ("0100", "100"),
        ("5,0", "0,5"),
    ],
)
def test_one_text_stands_for_the_same_ids(text: str, expected: str) -> None:
    assert number_ranges.spelled(number_ranges.parse(text)) == expected


@pytest.mark.parametrize("text", ["", ",", "1,", "4095", "1-4095", "9-5", "-5", "1-", "1-2-3", "x", "1 2", "٣"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^"):
        number_ranges.parse(text)
