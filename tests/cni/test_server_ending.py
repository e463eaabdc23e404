"""The CNI server at the limits of the process, and at its end."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from agent.errors import ConfigError, LedgerError
from cni import protocol
from cni.attachment import Attachments
from cni.call import Call
from cni.server import ACCEPT_PAUSE_SECONDS, WAITING_THREADS, CniServer
from tests.waiting import until

CONF = b'{"cniVersion": "1.0.0", "name": "rails", "type": "nodefabric"}'


class Attaching:
    """An ADD that takes until told, and then fails if the books were closed meanwhile."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.books_closed = False

    def add(self, call: Call) -> Mapping[str, Any]:
        """Wait, then succeed or fail."""
        self.begun.set()
        assert self.go_on.wait(10)
        if self.books_closed:
            raise LedgerError("the books are closed")
        return {"cniVersion": "1.0.0"}


@contextmanager
def served(folder: Path, attaching: Attaching) -> Iterator[CniServer]:
    """Listen on `folder/s`."""
    server = CniServer(
        folder / "s", cast(Attachments, attaching), condition=lambda: None, observe=lambda _: nullcontext()
    )
    server.start()
    try:
        yield server
    finally:
        attaching.go_on.set()
        server.close()


def ask(folder: Path, command: str) -> socket.socket:
    """Send a request."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str(folder / "s"))
    env = {"CNI_COMMAND": command, "CNI_CONTAINERID": "c1", "CNI_IFNAME": "net1", "CNI_NETNS": "/proc/self/ns/net"}
    with open("/proc/self/ns/net") as netns:
        socket.send_fds(connection, [protocol.encode_request(protocol.Request(env, CONF))], [netns.fileno()])
    return connection


def answer_of(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    with connection, connection.makefile("rb") as answer:
        return answer.read()


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let this process open nothing more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)


def test_a_server_without_a_free_descriptor_serves_again_once_there_is_one(
    short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(short_folder, Attaching()):
        waiting = ask(short_folder, "VERSION")
        assert b"supportedVersions" in answer_of(waiting)
        with contextlib.ExitStack() as stack:
            # A thread that waits in accept(2) has its descriptor already.
            early = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(WAITING_THREADS + 1)]
            stack.enter_context(no_descriptor_left())
            for caller in early:
                caller.connect(str(short_folder / "s"))
            until(lambda: "cannot be taken" in caplog.text)
            early[-1].settimeout(0.1)
            with pytest.raises(TimeoutError):
                early[-1].recv(1)
            threading.Event().wait(10 * ACCEPT_PAUSE_SECONDS)
            # Each thread may say it once: it goes on for hours, maybe.
            assert caplog.text.count("cannot be taken") <= WAITING_THREADS
        assert b"supportedVersions" in answer_of(ask(short_folder, "VERSION"))


def test_a_server_whose_socket_was_removed_is_found_again(short_folder: Path) -> None:
    attaching, threads = Attaching(), threading.active_count()
    with served(short_folder, attaching) as server:
        under_way = ask(short_folder, "ADD")
        assert attaching.begun.wait(10)
        assert server.stands()
        for _ in range(3):
            (short_folder / "s").unlink()
            assert not server.stands()
            server.listen_anew()
            assert server.stands()
            for _ in range(2 * WAITING_THREADS):
                assert b"supportedVersions" in answer_of(ask(short_folder, "VERSION"))
        attaching.go_on.set()
        assert b'"cniVersion"' in answer_of(under_way)
    assert not (short_folder / "s").exists()
    server.listen_anew()  # late: the end has come
    assert not (short_folder / "s").exists()
    until(lambda: threading.active_count() <= threads)


def test_a_server_without_a_socket_stands_nowhere(short_folder: Path) -> None:
    """Its socket may be gone again before it was looked at."""
    attachments = cast(Attachments, Attaching())
    server = CniServer(short_folder / "s", attachments, condition=lambda: None, observe=lambda _: nullcontext())
    assert not server.stands()


def test_a_socket_that_another_agent_has_taken_is_left_to_it(short_folder: Path) -> None:
    with served(short_folder, Attaching()) as server:
        (short_folder / "s").unlink()
        with served(short_folder, Attaching()) as other:
            with pytest.raises(ConfigError, match="another agent serves this socket"):
                server.listen_anew()
            server.close()
            assert b"supportedVersions" in answer_of(ask(short_folder, "VERSION"))
            assert other.stands()


def test_the_end_waits_for_a_request_that_is_nearly_done(short_folder: Path) -> None:
    attaching = Attaching()
    with served(short_folder, attaching) as server:
        connection = ask(short_folder, "ADD")
        assert attaching.begun.wait(10)
        threading.Timer(0.05, attaching.go_on.set).start()
        server.close(10)
        assert b'"cniVersion"' in answer_of(connection)


def test_a_request_that_the_end_made_fail_is_left_to_the_next_agent(short_folder: Path) -> None:
    attaching = Attaching()
    with served(short_folder, attaching) as server:
        connection = ask(short_folder, "ADD")
        assert attaching.begun.wait(10)
        server.close(0.01)
        attaching.books_closed = True
        attaching.go_on.set()
        # A connection that closes without an answer makes the relay ask again.
        assert answer_of(connection) == b""
