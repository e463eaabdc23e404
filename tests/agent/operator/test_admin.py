"""The operator's socket: what it hears, what it answers, and what it does not put up with."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AgentError, InUse, RequestInvalid
from agent.operator.admin import MAX_REQUEST, AdminServer, RequestRefused, ask

DO = {"command": "do"}


class Door:
    """A server, and what it was asked for."""

    def __init__(self, path: Path, receive_seconds: float = 20.0) -> None:
        self.path = path
        self.asked: list[Mapping[str, Any]] = []
        self.error: Exception | None = None
        self.server = AdminServer(path, {"do": self._answer}, receive_seconds=receive_seconds)

    def _answer(self, request: Mapping[str, Any]) -> str:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        return "it is done"

    def send(self, data: bytes, *, end: bool = True) -> bytes:
        """Send raw bytes, and read all that comes."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(self.path))
            connection.sendall(data)
            if end:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while more := connection.recv(65536):
                answer += more
            return answer


@pytest.fixture
def door(short_folder: Path) -> Iterator[Door]:
    door = Door(short_folder / "run/admin.sock")
    door.server.start()
    try:
        yield door
    finally:
        door.server.close()


@pytest.mark.parametrize(
    ("error", "text", "kind"),
    [
        (InUse("a pod has it"), "^a pod has it$", InUse),
        (RequestInvalid("no such GPU"), "^no such GPU$", RequestInvalid),
        (RuntimeError("boom"), "unexpected error: boom", RequestRefused),
    ],
)
def test_an_error_is_told_as_it_is_and_ends_one_request_only(
    door: Door, error: Exception, text: str, kind: type[AgentError]
) -> None:
    door.error = error
    with pytest.raises(kind, match=text):
        ask(door.path, DO)
    door.error = None
    assert ask(door.path, DO) == "it is done"


def test_a_command_that_nobody_knows_is_refused(door: Door) -> None:
    with pytest.raises(RequestInvalid, match="command must be one of do, is 'undo'"):
        ask(door.path, {"command": "undo"})


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"{", b"{}", b"[]\n", b"garbage\n", b"\xff\n", b"[" * 10000 + b"\n", b"x" * (MAX_REQUEST + 9)]
)
def test_what_is_no_request_gets_no_answer(door: Door, data: bytes) -> None:
    try:
        answer = door.send(data)
    except ConnectionError:  # it had closed before all was sent
        answer = b""
    assert answer == b""
    assert door.asked == []
    assert ask(door.path, DO) == "it is done"
