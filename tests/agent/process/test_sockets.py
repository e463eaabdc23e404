"""The sockets of runtime and operator: who may call, callers that are slow or many, and the socket's file."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.errors import ConfigError
from agent.operator.admin import MAX_CONNECTIONS, AdminServer
from agent.process.sockets import ACCEPT_PAUSE_SECONDS, READY_THREADS, UnixServer
from cni import protocol
from cni.server import CniServer
from tests import descriptors, frames
from tests.cni.door import Scripted, read_all
from tests.waiting import until

PATIENCE = 0.4


@dataclass
class Door:
    """A server that is spoken to over its real socket."""

    server: UnixServer
    another: Callable[[], UnixServer]
    """Makes a second one at the same path."""
    request: bytes
    answer: bytes
    """What the right answer contains."""

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(30)
            connection.connect(str(self.server.path))
        except OSError:
            connection.close()
            raise
        return connection

    def answers(self) -> bool:
        with self.connect() as connection:
            connection.sendall(self.request)
            return self.answer in read_all(connection)


def cni(path: Path) -> CniServer:
    return CniServer(
        path, Scripted(), condition=lambda: None, observe=lambda _: nullcontext(), receive_seconds=PATIENCE
    )


def operator(path: Path) -> AdminServer:
    return AdminServer(path, {"do": lambda request: "it is done"}, receive_seconds=PATIENCE)


VERSION = frames.encode_request(protocol.Request({"CNI_COMMAND": "VERSION"}, b""))


@pytest.fixture(params=["cni", "operator"])
def closed(request: pytest.FixtureRequest, short_folder: Path) -> Iterator[Door]:
    """A server that does not listen yet."""
    make, asked = {"cni": (cni, VERSION), "operator": (operator, b'{"command": "do"}\n')}[request.param]
    path = short_folder / "run/s.sock"
    made = Door(make(path), lambda: make(path), asked, b"supportedVersions" if make is cni else b"it is done")
    yield made
    made.server.close(0)


@pytest.fixture
def door(closed: Door) -> Door:
    closed.server.start()
    return closed


def test_nobody_else_may_open_the_socket(door: Door) -> None:
    assert door.server.path.stat().st_mode & 0o077 == 0
    assert door.server.path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(door.server.path.parent) == ["s.sock"]


def test_another_user_is_not_heard(door: Door) -> None:
    number = {"x86_64": 117, "aarch64": 147}.get(platform.machine())
    if os.geteuid() != 0 or number is None:
        pytest.skip("becoming another user needs root")
    door.server.path.chmod(0o666)
    for folder in (door.server.path.parent, door.server.path.parent.parent):
        folder.chmod(0o755)
    heard: list[bytes | str] = []

    def as_nobody() -> None:
        # The bare system call changes this thread alone; libc's function would change them all.
        if ctypes.CDLL(None, use_errno=True).syscall(number, 65534, 65534, 65534) != 0:
            heard.append("this user namespace has no other user")
            return
        with door.connect() as connection:
            with suppress(OSError):
                connection.sendall(door.request)
            heard.append(read_all(connection))

    thread = threading.Thread(target=as_nobody)
    thread.start()
    thread.join()
    if isinstance(heard[0], str):
        pytest.skip(heard[0])
    assert heard == [b""]
    assert door.answers()


def test_a_second_agent_is_refused_and_the_first_stays(door: Door) -> None:
    second = door.another()
    with pytest.raises(ConfigError, match="another agent serves this socket: stop it, or set runDir"):
        second.start()
    second.close()
    assert door.answers()
    assert os.listdir(door.server.path.parent) == ["s.sock"]


def test_an_agent_with_more_callers_than_it_takes_keeps_its_socket(closed: Door) -> None:
    closed.server.path.parent.mkdir()
    with ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(closed.server.path))
        busy.listen(0)
        with suppress(BlockingIOError):
            while True:
                caller = stack.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(str(closed.server.path))
        with pytest.raises(ConfigError, match="another agent serves this socket"):
            closed.server.start()


@pytest.mark.parametrize("kind", ["socket", "file"])
def test_what_a_dead_agent_left_is_taken_over(closed: Door, kind: str) -> None:
    closed.server.path.parent.mkdir()
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(closed.server.path))
    else:
        closed.server.path.touch()
    closed.server.start()
    assert closed.answers()
    closed.server.close()
    assert os.listdir(closed.server.path.parent) == []


@pytest.mark.parametrize("make", [cni, operator])
@pytest.mark.parametrize("name", ["x" * 120 + "/s.sock", "file/s.sock", "folder"])
def test_a_path_that_cannot_be_had_is_a_config_error(
    short_folder: Path, make: Callable[[Path], UnixServer], name: str
) -> None:
    (short_folder / "file").touch()
    (short_folder / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"(s\.sock|folder).*cannot be made"):
        make(short_folder / name).start()


def test_a_socket_that_was_removed_is_made_again(door: Door) -> None:
    threads = threading.active_count()
    for _ in range(3):
        assert door.server.stands()
        door.server.path.unlink()
        assert not door.server.stands()
        door.server.listen_again()
        assert all(door.answers() for _ in range(2 * READY_THREADS))
    door.server.close()
    assert not door.server.path.exists()
    assert door.server.stands()
    door.server.listen_again()  # late: the end has come
    assert not door.server.path.exists()
    until(lambda: threading.active_count() < threads)


def test_a_server_stands_from_its_start_on_also_where_its_sockets_mode_was_changed(closed: Door) -> None:
    assert not closed.server.stands()
    closed.server.start()
    closed.server.path.chmod(0o660)
    assert closed.server.stands()
    closed.server.close()
    assert not closed.server.path.exists()


def test_a_socket_that_another_agent_has_taken_is_left_to_it(door: Door) -> None:
    door.server.path.unlink()
    second = door.another()
    second.start()
    with pytest.raises(ConfigError, match="another agent serves this socket"):
        door.server.listen_again()
    door.server.close()
    assert second.stands()
    assert door.answers()
    second.close()


def test_who_says_nothing_or_trickles_is_hung_up_on(door: Door) -> None:
    def trickle() -> None:
        with suppress(OSError):
            while not stop.wait(0.05):
                slow.send(door.request[:1])

    stop = threading.Event()
    with door.connect() as silent, door.connect() as slow:
        slow.send(door.request[:1])
        thread = threading.Thread(target=trickle)
        thread.start()
        assert (read_all(silent), read_all(slow)) == (b"", b"")
        stop.set()
        thread.join()
    assert door.answers()


def test_a_crowd_that_says_nothing_keeps_others_no_longer_than_it_may_take(door: Door) -> None:
    with ExitStack() as stack:
        for _ in range(2 * MAX_CONNECTIONS):
            stack.enter_context(door.connect())
        assert door.answers()


def test_running_out_of_descriptors_passes_and_is_not_said_each_time(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    # Each thread that waits has a descriptor for its next connection already (accept(2) takes it first).
    callers = [socket.socket(socket.AF_UNIX) for _ in range(READY_THREADS + 2)]
    with ExitStack() as stack:
        for caller in callers:
            stack.enter_context(caller).settimeout(10)
        with descriptors.none_left():
            for caller in callers:
                caller.connect(str(door.server.path))
            until(lambda: "cannot be taken" in caplog.text)
            time.sleep(10 * ACCEPT_PAUSE_SECONDS)
    assert door.answers()
    assert caplog.text.count("cannot be taken") <= len(callers)  # again after each that is taken meanwhile


def test_a_node_without_a_thread_is_said_and_the_socket_can_be_had_later(closed: Door) -> None:
    former = threading.stack_size(1 << 46)  # more than there is, so no thread can be started
    try:
        with pytest.raises(ConfigError, match=r"s\.sock.*cannot be served: no thread can be started"):
            closed.server.start()
    finally:
        threading.stack_size(former)
    assert not closed.server.path.exists()
    closed.server.start()
    assert closed.answers()
