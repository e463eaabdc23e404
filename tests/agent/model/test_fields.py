"""JSON from outside: what is refused before anybody reads it, and how errors name the place."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.model.fields import MAX_BYTES, MAX_DEPTH, NotJson, decode, unicast_mac


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "the text is not JSON: Expecting value"),
        (b"{", "the text is not JSON: Expecting property name"),
        (b'{"a": 1} x', "the text is not JSON: Extra data"),
        (b"\xff\xfe{\x00}\x00", "the text is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"\xef\xbb\xbf{}", "the text is not JSON: Unexpected UTF-8 BOM"),
        (b'{"a": NaN}', "the text is not JSON: NaN is no JSON number"),
        (b'{"a": -Infinity}', "the text is not JSON: -Infinity is no JSON number"),
        (b'{"a": 1e999}', "the text is not JSON: the number 1e999 is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "the text is not JSON: the number 99999999999999999999... has 5000 digits"),
        (b'{"a": 1, "a": 2}', "a is in the text twice: leave one"),
        (b'{"a": {"b": [1, {"c": 1, "d": 2, "c": 1}]}}', "c is in the text twice: leave one"),
        (b'{"\\ud800": 1, "\\ud800": 2}', r"'\ud800' is in the text twice: leave one"),
        (b'{"a": ["x\\uD800y"]}', "the text is not JSON: half of a surrogate pair"),
        (b'{"\\udfff": 1}', "the text is not JSON: half of a surrogate pair"),
        (b"[" * 100_000, "the text is not JSON: "),
        (b"[" * 65 + b"]" * 65, "the text is nested more than 64 levels deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "the text is nested more than 64 levels deep"),
        (b" " * (MAX_BYTES + 1), "the text has 1048577 bytes, and 1048576 are allowed: make it smaller"),
    ],
)
def test_what_two_readers_could_understand_differently_is_refused(text: bytes, says: str) -> None:
    with pytest.raises(NotJson) as caught:
        decode(text, "the text")
    assert str(caught.value).startswith(says)
    assert len(str(caught.value)) < 300


def test_what_is_long_or_deep_but_allowed_is_read() -> None:
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert json.dumps(decode(deep, "x")).encode() == deep
    assert len(decode(b"[" + b"{}," * 1000 + b"{}]", "x")) == 1001
    assert len(decode(b'"' + b"x" * (MAX_BYTES - 2) + b'"', "x")) == MAX_BYTES - 2


def test_letters_beyond_the_basic_plane_may_be_written_as_pairs() -> None:
    assert decode(b'{"a": "\\ud83d\\ude00 \\\\ud800"}', "x") == {"a": "\U0001f600 \\ud800"}


@pytest.mark.parametrize(
    ("text", "mac"),
    [
        ("02:00:00:00:00:AA", "02:00:00:00:00:aa"),
        ("02-00-00-00-00-aa", "02:00:00:00:00:aa"),
        ("0200.0000.00aa", "02:00:00:00:00:aa"),
        ("0200.0000.00aa.0000", None),
        ("02-00:00-00-00-aa", None),
        ("01:00:00:00:00:00", None),
        ("ff:ff:ff:ff:ff:ff", None),
        ("00:00:00:00:00:00", None),
        ("02:00:00:00:00:aa:00:00", None),
        ("", None),
    ],
)
def test_a_mac_address_may_be_spelt_as_go_reads_it(text: str, mac: str | None) -> None:
    assert unicast_mac(text) == mac


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text('{}[]":,0123456789eE.-+tfn \\u', max_size=40).map(str.encode))
def test_whatever_bytes_come_nothing_but_a_request_error_is_raised(text: bytes) -> None:
    with suppress(NotJson):
        json.dumps(decode(text, "x"))
