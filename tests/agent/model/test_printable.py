"""What comes from outside ends no line and steers no terminal."""

from __future__ import annotations

import pytest

from agent.model.printable import joined, one_line, unknown


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


@pytest.mark.parametrize(
    ("word", "meant"), [("isRDMA", "isRdma"), ("slect", "select"), ("ISRDMA", "isRdma"), ("x", "")]
)
def test_a_word_that_is_not_known_names_the_near_one(word: str, meant: str) -> None:
    said = f" (did you mean {meant!r}?)" if meant else ""
    assert unknown(word, ["select", "isRdma"]) == f"is not a known key{said}; known are: isRdma, select"
