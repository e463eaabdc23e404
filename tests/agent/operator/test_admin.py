"""The operator's socket: what it hears, what it answers, and what it does not put up with."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.errors import ConfigError, InUse, Unavailable
from agent.operator.admin import MAX_CONNECTIONS, MAX_REQUEST, AdminServer, RequestRefused, ask


class Door:
    """A server, and what it was asked for."""

    def __init__(self, path: Path, receive_seconds: float = 20.0) -> None:
        self.path = path
        self.asked: list[Mapping[str, Any]] = []
        self.error: Exception | None = None
        self.server = AdminServer(path, self._answer, receive_seconds=receive_seconds)

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


def test_a_request_is_carried_out_and_answered(door: Door) -> None:
    assert ask(door.path, {"command": "release", "device": "ü"}) == "it is done"
    assert door.asked == [{"command": "release", "device": "ü"}]


def test_only_root_can_reach_the_socket(door: Door) -> None:
    assert door.path.stat().st_mode & 0o777 == 0o600
    assert door.path.parent.stat().st_mode & 0o077 == 0


def test_errors_are_told_with_their_reason(door: Door) -> None:
    door.error = InUse("a pod has it")
    with pytest.raises(RequestRefused, match="a pod has it") as caught:
        ask(door.path, {})
    assert caught.value.told_reason == "InUse"


def test_an_unexpected_error_ends_one_request_only(door: Door) -> None:
    door.error = RuntimeError("boom")
    with pytest.raises(RequestRefused, match="unexpected error: boom"):
        ask(door.path, {})
    door.error = None
    assert ask(door.path, {}) == "it is done"


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
    assert ask(door.path, {}) == "it is done"


def test_who_sends_nothing_is_let_go(short_folder: Path) -> None:
    door = Door(short_folder / "admin.sock", receive_seconds=0.2)
    door.server.start()
    try:
        assert door.send(b'{"command"', end=False) == b""
    finally:
        door.server.close()


def test_a_crowd_is_turned_away_and_nobody_else_is_kept_waiting(door: Door) -> None:
    go = threading.Event()
    door.server._answer = lambda request: str(go.wait(20))

    def linger() -> None:
        with contextlib.suppress(ConnectionError):  # whoever came after the questions below is turned away
            door.send(b"{}\n")

    crowd = [threading.Thread(target=linger) for _ in range(4)]
    for thread in crowd:
        thread.start()
    try:
        refused = 0
        while not refused:
            try:
                ask(door.path, {}, seconds=0.2)
            except Unavailable as error:
                refused += "ended inside a line" in str(error) or "reset" in str(error)
    finally:
        go.set()
        for thread in crowd:
            thread.join()


def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"does not answer at .*No such file"):
        ask(tmp_path / "admin.sock", {})


def test_a_socket_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        AdminServer(tmp_path / "file/admin.sock", lambda request: "").start()


def test_a_socket_of_a_killed_agent_is_replaced(short_folder: Path) -> None:
    path = short_folder / "admin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = AdminServer(path, lambda request: json.dumps(dict(request)))
    server.start()
    try:
        assert ask(path, {"a": 1}) == '{"a": 1}'
    finally:
        server.close()
    assert os.listdir(short_folder) == []


def test_a_second_agent_does_not_take_the_socket_of_one_that_serves(door: Door) -> None:
    second = AdminServer(door.path, lambda request: "by the second")
    with pytest.raises(ConfigError, match="another agent serves this socket"):
        second.start()
    second.close()
    assert ask(door.path, {}) == "it is done"
    assert os.listdir(door.path.parent) == ["admin.sock"]


def test_an_agent_that_ends_leaves_the_socket_that_another_has_put_in_place_of_its_own(short_folder: Path) -> None:
    path = short_folder / "admin.sock"
    first = AdminServer(path, lambda request: "by the first")
    second = AdminServer(path, lambda request: "by the second")
    first.start()
    path.unlink()  # somebody has removed it, so that the second finds the place free
    second.start()
    try:
        first.close()
        assert ask(path, {}) == "by the second"
    finally:
        second.close()
    assert not path.exists()


def test_an_agent_with_more_callers_than_it_takes_keeps_its_socket(short_folder: Path) -> None:
    path = short_folder / "admin.sock"
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(path))
        busy.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                caller = stack.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(str(path))
        with pytest.raises(ConfigError, match="another agent serves this socket"):
            AdminServer(path, str).start()


def test_an_operator_who_gets_no_thread_ends_the_socket_for_nobody_else(door: Door) -> None:
    former = threading.stack_size(1 << 46)  # more than there is, so no thread can be started
    try:
        for _ in range(MAX_CONNECTIONS + 1):
            with pytest.raises(Unavailable):
                ask(door.path, {"command": "release"}, 10)
    finally:
        threading.stack_size(former)
    assert ask(door.path, {"command": "release"}, 10) == "it is done"
