"""What the API server answers, read within bounds."""

from __future__ import annotations

import tracemalloc
from io import BytesIO
from typing import Any

import pytest
from urllib3 import HTTPResponse

from agent.cluster.apiserver import MAX_ANSWER_BYTES, POD, ApiServer, body_of, decoded
from agent.errors import Unavailable


def answer(data: bytes) -> HTTPResponse:
    return HTTPResponse(BytesIO(data), status=200, preload_content=False)


class Answering:
    """A client that hears one answer, whatever it asks."""

    def __init__(self, data: bytes) -> None:
        self.response = answer(data)

    def param_serialize(self, *request: Any, **how: Any) -> tuple[str, str, dict[str, str]]:
        return "GET", "http://x/", {}

    @property
    def rest_client(self) -> Answering:
        return self

    @property
    def pool_manager(self) -> Answering:
        return self

    def request(self, *request: Any, **how: Any) -> HTTPResponse:
        return self.response


@pytest.mark.parametrize("data", [b"", b"{", b"<html>", b'{"a": 1} x', b"\xff"])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(Unavailable, match="GET /x: the answer is not"):
        decoded(data, "GET /x")


def test_an_answer_without_end_is_refused() -> None:
    assert len(body_of(answer(bytes(MAX_ANSWER_BYTES)))) == MAX_ANSWER_BYTES
    with pytest.raises(Unavailable, match="is larger than"):
        body_of(answer(bytes(MAX_ANSWER_BYTES + 1)))


def test_no_more_than_one_pod_is_decoded_at_a_time() -> None:
    """Who may create pods could otherwise have the agent killed for its memory, and again after each start."""
    env = ",".join(f'{{"name":"A{number:05}"}}' for number in range(20_000))
    item = f'{{"metadata":{{"uid":"u"}},"spec":{{"containers":[{{"env":[{env}]}}]}},"status":{{}}}}'
    data = f'{{"metadata":{{"resourceVersion":"7"}},"items":[{",".join([item] * 10)}]}}'.encode()
    client = ApiServer(Answering(data))
    tracemalloc.start()
    try:
        assert client.list_of(POD, {}, lambda pod: pod["metadata"]["uid"]) == ("7", ["u"] * 10)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
