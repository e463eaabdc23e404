"""What comes from outside ends no line and steers no terminal."""

from __future__ import annotations

import pytest

from agent.model.printable import joined, one_line


@pytest.mark.parametrize("text", ["", "plain", "Zürich – ▲", "a  b", "back\\slash\\n"])
def test_text_is_shown_as_it_is(text: str) -> None:
    assert one_line(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines", "two\\nlines"),
        ("\r\x1b[2Jx", "\\r\\x1b[2Jx"),
        ("\x85\u2028\u2029", "\\x85\\u2028\\u2029"),
        ("\u202eevil", "\\u202eevil"),
        ("\udcff", "\\udcff"),
    ],
)
def test_what_would_end_a_line_or_steer_a_terminal_is_spelled_out(text: str, shown: str) -> None:
    assert one_line(text) == shown
    assert one_line(shown) == shown


def test_each_line_stays_one() -> None:
    assert joined(["a", "", "b\nc"]) == "a\n\nb\\nc"
