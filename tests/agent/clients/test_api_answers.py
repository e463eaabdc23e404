"""Lists of the API server, read object by object."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.clients.api_answers import MAX_ANSWER_BYTES, listed
from agent.errors import Unavailable


class Answer:
    """An answer that comes in pieces of a size."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self.data = data
        self.size = size

    def stream(self, amount: int) -> Iterator[bytes]:
        size = self.size or amount
        for at in range(0, len(self.data), size):
            yield self.data[at : at + size]


def read(data: bytes, size: int | None = None) -> dict[str, Any]:
    return listed(Answer(data, size), lambda item: item, "GET /x")


OBJECTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.lists(st.dictionaries(st.text(max_size=4), OBJECTS, max_size=4), max_size=4),
    st.dictionaries(st.sampled_from(["kind", "metadata", "x", "ü"]), OBJECTS, max_size=3),
    st.integers(1, 40),
    st.booleans(),
)
def test_a_list_is_read_as_it_is_however_it_comes(
    items: list[dict[str, Any]], more: dict[str, Any], size: int, is_ascii: bool
) -> None:
    document = {**more, "items": items, "last": 1}
    text = json.dumps(document, ensure_ascii=is_ascii, indent=size % 3 or None) + "\n"
    assert read(text.encode(), size) == document


def test_a_list_of_nothing_and_what_is_no_object_in_it_are_read() -> None:
    assert read(b'{"items": null, "a": 1}') == {"items": None, "a": 1}
    assert read(b'{"items": [1, {"b": 2}, null]}') == {"items": [{"b": 2}]}
    assert read(b"{}") == {}


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b" ", b"[]", b"5", b"{", b'{"a"', b'{"a":', b'{"a": 1', b'{"items": [', b'{"items": [{}'),
        *(b'{"items": [{"a": ', b'{"items": []} x', b'{"items": [\xff]}', b'{"a" 1}'),
    ],
)
def test_what_is_cut_or_no_list_is_refused(data: bytes) -> None:
    for size in (1, 3, None):
        with pytest.raises(Unavailable, match="GET /x: the answer is not JSON, or not an object"):
            read(data, size)


def test_an_answer_without_end_is_refused() -> None:
    with pytest.raises(Unavailable, match="is larger than"):
        read(b'{"items": [' + b'{"a": 1},' * (MAX_ANSWER_BYTES // 8))


def test_no_more_than_one_object_is_decoded_at_a_time() -> None:
    """Who may create pods could otherwise have the agent killed for its memory, and again after each start."""
    env = ",".join(f'{{"name":"A{number:05}"}}' for number in range(20_000))
    item = f'{{"metadata":{{"uid":"u"}},"spec":{{"containers":[{{"env":[{env}]}}]}}}}'
    answer = Answer(f'{{"metadata":{{}},"items":[{",".join([item] * 30)}]}}'.encode())
    tracemalloc.start()
    try:
        found = listed(answer, lambda pod: pod["metadata"]["uid"], "GET /x")
        assert found == {"metadata": {}, "items": ["u"] * 30}
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
