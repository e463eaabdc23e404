"""Callers of the CNI socket that are hostile, slow or many, and the socket itself."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from agent.errors import (
    ConfigError,
)
from agent.kubelet.podresources import MAX_ASKING
from cni import protocol
from cni.attach import MAX_ADDING
from cni.call import Call
from cni.protocol import Request
from cni.server import BACKLOG, MAX_CONNECTIONS, MAX_SLOW, WAITING_THREADS
from tests.cni.door import CONF, ENV, NEWEST, Door, read_all
from tests.waiting import until

CROWD = 96


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"x",
        b"GET / HTTP/1.0\r\n\r\n",
        b"NFC1",
        b"NFC1\0\0\0\x05ab",
        b"NFC1\0\0\0\0",
        b"NFC1" + struct.pack(">I", protocol.MAX_REQUEST + 1) + b"x" * 1000,
        b"NFC1\xff\xff\xff\xff",
    ],
)
def test_garbage_is_hung_up_on_and_the_next_caller_served(door: Door, frame: bytes) -> None:
    assert door.knock(frame) == b""
    assert door.ask("ADD")[0] == 0


def test_an_add_that_nobody_waits_for_any_more_is_not_carried_out_and_a_del_is(
    short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may have lain in the queue of an agent that was stuck, and the ADD's own DEL has gone another way since."""
    door = Door(short_folder / "cni.sock")

    def first() -> None:
        for command in ("ADD", "DEL"):
            frame = protocol.encode_request(Request({**ENV, "CNI_COMMAND": command}, json.dumps(CONF).encode()))
            with door.connect() as caller, open("/proc/self/ns/net") as netns:
                socket.send_fds(caller, [frame], [netns.fileno()])

    door.server.start(first)
    until(lambda: "nobody waits for this ADD" in caplog.text)
    until(lambda: [command for command, _ in door.attachments.calls] == ["DEL"])
    door.server.close()


def test_a_request_with_two_descriptors_is_hung_up_on(door: Door) -> None:
    frame = protocol.encode_request(Request({**ENV, "CNI_COMMAND": "ADD"}, json.dumps(CONF).encode()))
    with open("/proc/self/ns/net") as file:
        assert door.knock(frame, file.fileno(), file.fileno()) == b""
    assert door.attachments.calls == []


def test_descriptors_are_closed_when_a_request_is_done(door: Door) -> None:
    door.ask("ADD")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        door.ask("ADD")
        door.ask("UPDATE")
        door.knock(b"garbage!")
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def impatient(short_folder: Path) -> Iterator[Door]:
    """A server that waits a moment only for a request."""
    made = Door(short_folder / "run/cni.sock", receive_seconds=0.4)
    made.server.start()
    yield made
    made.server.close()


def test_a_caller_that_says_nothing_is_hung_up_on(impatient: Door) -> None:
    with impatient.connect() as silent:
        assert read_all(silent) == b""


def test_a_caller_that_trickles_is_hung_up_on(impatient: Door) -> None:
    with impatient.connect() as slow:
        stop = threading.Event()

        def trickle() -> None:
            with suppress(OSError):
                while not stop.wait(0.05):
                    slow.send(b"N")

        slow.sendall(b"NFC1\0\0\xff\0")
        thread = threading.Thread(target=trickle)
        thread.start()
        assert read_all(slow) == b""
        stop.set()
        thread.join()


def test_a_caller_that_goes_away_harms_nobody(door: Door) -> None:
    frame = protocol.encode_request(Request({**ENV, "CNI_COMMAND": "GC"}, json.dumps(CONF).encode()))
    for _ in range(3):
        with door.connect() as connection:
            connection.sendall(frame)
    assert door.ask("ADD")[0] == 0


def test_a_crowd_of_silent_callers_delays_nobody_and_ends_nothing_under_way(door: Door) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(call: Call) -> Mapping[str, Any]:
        begun.set()
        assert go.wait(30)
        return {}

    answers: list[tuple[int, Any]] = []
    under_way = threading.Thread(target=lambda: answers.append(door.ask("ADD")))
    door.attachments.does = wait
    under_way.start()
    assert begun.wait(30)
    door.attachments.does = lambda call: {"cniVersion": "1.0.0"}
    with ExitStack() as stack:
        for _ in range(CROWD):
            stack.enter_context(door.connect()).send(b"NFC1")
            assert door.ask("ADD")[0] == 0
        go.set()
        under_way.join()
    assert answers == [(0, {"cniVersion": "1.0.0"})]


def test_who_only_looks_whether_somebody_listens_is_not_worth_a_word(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    """install-cni does, and an agent that starts."""
    for _ in range(3):
        door.connect().close()
    with door.connect() as rude:
        rude.send(b"NFC1")
    until(lambda: "ended early: the connection ended inside a frame" in caplog.text)
    assert caplog.text.count("ended early") == 1


@pytest.mark.parametrize(("command", "other"), [("CHECK", "GC"), ("GC", "CHECK")])
def test_few_checks_and_collections_wait_at_once_and_of_one_network_half_of_them(
    door: Door, command: str, other: str
) -> None:
    begun, go = threading.Semaphore(0), threading.Event()

    def wait(call: Call) -> Mapping[str, Any]:
        begun.release()
        assert go.wait(30)
        return {}

    door.attachments.does = wait
    answers: list[tuple[int, Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(door.ask(command, NEWEST))) for _ in range(MAX_SLOW // 2)]
    for thread in threads:
        thread.start()
        assert begun.acquire(timeout=30)
    status, error = door.ask(command, NEWEST)
    assert (status, error["code"]) == (1, 11)
    assert error["msg"].startswith(f"network rails has {MAX_SLOW // 2} CHECKs and GCs under way ")
    go.set()
    assert door.ask(other, NEWEST) == (0, None)
    for thread in threads:
        thread.join()
    assert answers == [(0, None)] * len(threads)
    assert door.ask(command, NEWEST) == (0, None)


def test_whatever_may_take_long_leaves_connections_to_what_does_not() -> None:
    assert MAX_SLOW + MAX_ADDING + MAX_ASKING < MAX_CONNECTIONS - 80


def test_all_that_have_waited_for_an_agent_are_served_at_once(short_folder: Path) -> None:
    """However long it takes until their requests are read: a relay that is hung up on takes the agent for dying."""
    door = Door(short_folder / "cni.sock")
    frame = protocol.encode_request(Request({**ENV, "CNI_COMMAND": "DEL"}, json.dumps(CONF).encode()))
    with ExitStack() as stack:
        callers: list[socket.socket] = []

        def first() -> None:
            callers.extend(stack.enter_context(door.connect()) for _ in range(BACKLOG))

        door.server.start(first)
        until(lambda: len(os.listdir("/proc/self/fd")) > 2 * BACKLOG)  # all are taken
        for caller in callers:
            caller.sendall(frame)
        assert all(read_all(caller) for caller in callers)
    door.server.close()


def test_calls_run_side_by_side(door: Door) -> None:
    meeting = threading.Barrier(3, timeout=10)

    def meet(call: Call) -> Mapping[str, Any]:
        meeting.wait()
        return {}

    door.attachments.does = meet
    answers: list[tuple[int, Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(door.ask("ADD"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [(0, {"cniVersion": "1.0.0"})] * 3


def test_more_calls_than_there_are_threads_waiting_run_side_by_side_again_and_again(door: Door) -> None:
    meeting = threading.Barrier(3 * WAITING_THREADS, timeout=10)

    def meet(call: Call) -> Mapping[str, Any]:
        meeting.wait()
        return {}

    door.attachments.does = meet
    before = threading.active_count()
    for _ in range(3):
        threads = [threading.Thread(target=door.ask, args=("ADD",)) for _ in range(3 * WAITING_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    deadline = time.monotonic() + 30
    while threading.active_count() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 1


def test_running_out_of_descriptors_passes(door: Door) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.settimeout(10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
        try:
            waiting.connect(str(door.path))
            threading.Event().wait(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        waiting.sendall(protocol.encode_request(Request({"CNI_COMMAND": "VERSION"}, b"")))
        assert protocol.decode_answer(read_all(waiting)).exit == 0
    assert door.ask("ADD")[0] == 0


def test_another_user_is_not_heard(door: Door) -> None:
    numbers = {"x86_64": 117, "aarch64": 147}
    number = numbers.get(platform.machine())
    if os.geteuid() != 0 or number is None:
        pytest.skip("becoming another user needs root")
    door.path.chmod(0o666)
    for folder in (door.path.parent, door.path.parent.parent):
        folder.chmod(0o755)
    heard: list[bytes | str] = []

    def as_nobody() -> None:
        # The bare system call changes this thread alone; libc's function would change them all.
        if ctypes.CDLL(None, use_errno=True).syscall(number, 65534, 65534, 65534) != 0:
            heard.append("this user namespace has no other user")
            return
        with door.connect() as connection:
            with suppress(OSError):
                connection.sendall(protocol.encode_request(Request({"CNI_COMMAND": "VERSION"}, b"")))
            heard.append(read_all(connection))

    thread = threading.Thread(target=as_nobody)
    thread.start()
    thread.join()
    if isinstance(heard[0], str):
        pytest.skip(heard[0])
    assert heard == [b""]
    assert door.ask("VERSION")[0] == 0


def test_nobody_else_may_open_the_socket(door: Door) -> None:
    assert door.path.stat().st_mode & 0o777 == 0o700
    assert door.path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in door.path.parent.iterdir()] == ["cni.sock"]


def test_a_second_agent_is_refused_and_the_first_stays(door: Door) -> None:
    second = Door(door.path)
    with pytest.raises(ConfigError, match="another agent serves this socket: stop it, or set runDir"):
        second.server.start()
    second.server.close()
    assert door.ask("ADD")[0] == 0
    assert [p.name for p in door.path.parent.iterdir()] == ["cni.sock"]


@pytest.mark.parametrize("kind", ["socket", "file"])
def test_what_a_dead_agent_left_is_taken_over(short_folder: Path, kind: str) -> None:
    path = short_folder / "cni.sock"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    else:
        path.touch()
    made = Door(path)
    made.server.start()
    assert made.ask("ADD")[0] == 0
    made.server.close()


@pytest.mark.parametrize("name", ["x" * 120 + "/cni.sock", "file/cni.sock", "folder"])
def test_a_path_that_cannot_be_had_is_a_config_error(short_folder: Path, name: str) -> None:
    (short_folder / "file").touch()
    (short_folder / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"cni\.sock|folder"):
        Door(short_folder / name).server.start()


def test_after_a_close_nobody_is_let_in_but_a_call_under_way_is_finished(door: Door) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(call: Call) -> Mapping[str, Any]:
        begun.set()
        go.wait(10)
        return {"cniVersion": "1.0.0"}

    door.attachments.does = wait
    answers: list[tuple[int, Any]] = []
    caller = threading.Thread(target=lambda: answers.append(door.ask("ADD")))
    caller.start()
    assert begun.wait(10)
    door.server.close()
    door.server.close()
    with pytest.raises(FileNotFoundError):
        door.connect()
    go.set()
    caller.join()
    assert answers == [(0, {"cniVersion": "1.0.0"})]
