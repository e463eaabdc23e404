"""Callers of the CNI socket that are hostile, slow or many, and those that the agent's end meets."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.errors import LedgerError
from agent.kubelet.podresources import MAX_ASKING
from agent.process.sockets import READY_THREADS
from cni import protocol
from cni.attachment import MAX_ADDING
from cni.call import Call
from cni.protocol import Request
from cni.server import BACKLOG, MAX_CONNECTIONS, MAX_SLOW
from tests import frames
from tests.cni.door import CONF, ENV, NEWEST, Door, read_all
from tests.waiting import soon, until


@contextmanager
def under_way(
    door: Door, count: int = 1, command: str = "ADD", conf: object = CONF
) -> Iterator[tuple[threading.Event, list[tuple[int, Any]]]]:
    """Have calls under way that go on when the event is set. The answers are all there at the end of the block."""
    begun, go = threading.Semaphore(0), threading.Event()
    does = door.attachments.does

    def wait(call: Call) -> Mapping[str, Any]:
        begun.release()
        assert go.wait(30)
        return does(call)

    answers: list[tuple[int, Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(door.ask(command, conf))) for _ in range(count)]
    door.attachments.does = wait
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=30)
    door.attachments.does = does
    try:
        yield go, answers
    finally:
        go.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b"NFC1\0\0\0\x05ab",
        b"NFC1" + struct.pack(">I", protocol.MAX_REQUEST + 1) + b"x" * 1000,
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
            frame = frames.encode_request(Request({**ENV, "CNI_COMMAND": command}, json.dumps(CONF).encode()))
            with door.connect() as caller, open("/proc/self/ns/net") as netns:
                socket.send_fds(caller, [frame], [netns.fileno()])

    door.server.start(first)
    until(lambda: "nobody waits for this ADD" in caplog.text)
    until(lambda: [command for command, _ in door.attachments.calls] == ["DEL"])
    door.server.close()


def test_descriptors_are_closed_when_a_request_is_done(door: Door) -> None:
    door.ask("ADD")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        door.ask("ADD")
        door.ask("UPDATE")
        door.knock(b"garbage!")
    assert len(os.listdir("/proc/self/fd")) <= before


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
    with under_way(door, MAX_SLOW // 2, command, NEWEST) as (_, answers):
        status, error = door.ask(command, NEWEST)
        assert (status, error["code"]) == (1, 11)
        assert error["msg"].startswith(f"network rails has {MAX_SLOW // 2} CHECKs and GCs under way ")
    assert door.ask(other, NEWEST) == (0, None)
    assert answers == [(0, None)] * (MAX_SLOW // 2)
    assert door.ask(command, NEWEST) == (0, None)


def test_whatever_may_take_long_leaves_connections_to_what_does_not() -> None:
    assert MAX_SLOW + MAX_ADDING + MAX_ASKING < MAX_CONNECTIONS - 80


def test_all_that_have_waited_for_an_agent_are_served_at_once(short_folder: Path) -> None:
    """However long it takes until their requests are read: a relay that is hung up on takes the agent for dying."""
    door = Door(short_folder / "cni.sock")
    frame = frames.encode_request(Request({**ENV, "CNI_COMMAND": "DEL"}, json.dumps(CONF).encode()))
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


def test_more_calls_than_there_are_threads_at_first_run_side_by_side(door: Door) -> None:
    with under_way(door, 3 * READY_THREADS) as (_, answers):
        assert door.ask("ADD")[0] == 0
        assert answers == []
    assert [status for status, _ in answers] == [0] * 3 * READY_THREADS


def test_calls_for_which_there_is_no_thread_wait_for_one_that_is_there(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    with under_way(door, READY_THREADS) as (go, answers):
        frame = frames.encode_request(Request({"CNI_COMMAND": "VERSION"}, b""))
        former = threading.stack_size(1 << 46)  # more than there is, so no thread can be started
        try:
            with door.connect() as waiting:
                waiting.sendall(frame)
                until(lambda: "have to wait for each other: can't start new thread" in caplog.text)
                go.set()
                assert frames.decode_answer(read_all(waiting)).exit == 0
        finally:
            threading.stack_size(former)
    assert len(answers) == READY_THREADS


def test_the_end_lets_nobody_in_and_a_call_under_way_is_answered_all_the_same(door: Door) -> None:
    with under_way(door) as (go, answers):
        assert not door.server.close(0.01)
        with pytest.raises(FileNotFoundError):
            door.connect()
        go.set()
    assert answers == [(0, {"cniVersion": "1.0.0"})]
    assert door.server.close()


def test_the_end_waits_for_a_call_that_is_nearly_done(door: Door) -> None:
    with under_way(door) as (go, _), soon(0.05, go.set):
        assert door.server.close(30)


def test_a_call_that_the_end_made_fail_is_left_to_the_next_agent(door: Door) -> None:
    """A connection that closes without an answer makes the relay ask again."""

    def fail(call: Call) -> Mapping[str, Any]:
        raise LedgerError("the books are closed")

    door.attachments.does = fail
    frame = frames.encode_request(Request({**ENV, "CNI_COMMAND": "DEL"}, json.dumps(CONF).encode()))
    assert frames.decode_answer(door.knock(frame)).exit == 1
    begun, go = threading.Event(), threading.Event()

    def wait(call: Call) -> Mapping[str, Any]:
        begun.set()
        assert go.wait(30)
        return fail(call)

    door.attachments.does = wait
    with door.connect() as caller:
        caller.sendall(frame)
        assert begun.wait(30)
        door.server.close(0.01)
        go.set()
        assert read_all(caller) == b""
