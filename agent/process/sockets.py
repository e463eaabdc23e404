"""Sockets of this machine: a server on a Unix socket for the agent's own user; HTTP to the agent's own addresses."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast

from agent.errors import ConfigError, Unavailable

PROBE_SECONDS = 1.0
ACCEPT_PAUSE_SECONDS = 0.1
READY_THREADS = 4
"""So many wait for a connection, from the start: a node without a thread to spare still serves calls."""
END_SECONDS = 0.5
"""How long the end of the agent waits for calls under way."""

log = logging.getLogger(__name__)
Identity = tuple[int, int, int]


class UnixServer:
    """Serves a Unix socket to the user that the agent runs as: each connection on a thread, so many at once.

    Threads take connections themselves, since to hand one over would cost a call a wake-up. More connections wait in
    the kernel's queue. A subclass says in `serve` what is done with one.
    """

    def __init__(self, path: Path, connections: int, backlog: int) -> None:
        self.path = path
        self.ending = threading.Event()
        self._connections = connections
        self._backlog = backlog
        self._mode = 0o600
        self._listener: socket.socket | None = None
        self._identity: Identity | None = None
        """Of the socket's file."""
        self._opening = threading.Lock()
        """Held while the listener is replaced or closed."""
        self._count = threading.Condition()
        self._threads = 0
        self._busy = 0
        self._is_short = False
        """No connection can be taken, which was logged."""

    def serve(self, connection: socket.socket) -> None:
        """Answer one connection, within bounds of time and input; then it is closed. May raise OSError, ValueError."""
        raise NotImplementedError

    def start(self, first: Callable[[], object] = lambda: None, mode: int = 0o600) -> None:
        """Listen, do something first, then serve. `first` must not raise: callers wait already.

        Raises ConfigError if another agent listens there, or the socket or a thread cannot be had.
        """
        self._mode = mode
        with self._opening:
            self._listener = self._open()
        first()
        for _ in range(READY_THREADS):
            self._add_thread()
        if not self._threads:
            self._stop_listening()
            raise ConfigError(str(self.path), ["cannot be served: no thread can be started"])

    def stands(self) -> bool:
        """Return whether callers still find this server: its socket's folder may be emptied. True once it is closed."""
        if self.ending.is_set():
            return True
        return self._is_in_place()

    def listen_again(self) -> None:
        """Make the socket again, for new callers. Calls under way go on. Raises ConfigError as `start` does."""
        with self._opening:
            before = self._listener
            if before is None:
                return  # the end has come
            self._listener = self._open()
        _end(before)

    def close(self, seconds: float = END_SECONDS) -> bool:
        """Stop listening, and wait a bounded time for calls under way. Returns whether all have ended."""
        self.ending.set()
        self._stop_listening()
        with self._count:
            return self._count.wait_for(lambda: not self._busy, seconds)

    def _stop_listening(self) -> None:
        with self._opening:
            listener, self._listener = self._listener, None
            if listener is None:
                return
            if self._is_in_place():  # else it is another agent's
                self.path.unlink(missing_ok=True)
            _end(listener)

    def _is_in_place(self) -> bool:
        """Whether the file is this server's. Its inode is not used again while it listens; modes may be changed."""
        found = identity(self.path)
        return found is not None and self._identity is not None and found[:2] == self._identity[:2]

    def _open(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._identity = listen(listener, self.path, self._backlog, self._mode)
        return listener

    def _add_thread(self) -> None:
        with self._count:
            self._threads += 1
        try:
            threading.Thread(target=self._work, name=self.path.stem, daemon=True).start()
        except RuntimeError as error:
            with self._count:
                self._threads -= 1
            log.error("connections to %s have to wait for each other: %s", self.path, error)

    def _work(self) -> None:
        """Serve one connection after the other, while no more than READY_THREADS wait for one."""
        while (listener := self._listener) is not None:
            try:
                connection = listener.accept()[0]
            except OSError as error:
                if listener is self._listener:
                    # Out of descriptors or memory: nobody else would serve this socket, so carry on.
                    self._report_shortage(error)
                continue
            self._is_short = False
            with self._count:
                self._busy += 1
                nobody_waits = self._busy == self._threads < self._connections
            if self.ending.is_set():
                connection.close()  # `close` may have said already that all calls have ended
            else:
                if nobody_waits:
                    self._add_thread()
                self._serve(connection)
            del connection
            with self._count:
                self._busy -= 1
                self._count.notify_all()
                if self._threads - self._busy > READY_THREADS:
                    self._threads -= 1
                    return
        with self._count:
            self._threads -= 1

    def _report_shortage(self, error: OSError) -> None:
        if not self._is_short:
            log.error("a connection to %s cannot be taken: %s", self.path, error)
        self._is_short = True
        self.ending.wait(ACCEPT_PAUSE_SECONDS)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                uid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
                if uid == os.geteuid():
                    self.serve(connection)
                else:
                    log.warning("refused a connection of user %d to %s", uid, self.path)
        except (OSError, ValueError, RecursionError) as error:
            log.warning("a connection to %s ended early: %s", self.path, error)
        except Exception:
            log.exception("a connection to %s met an unexpected error", self.path)


def receive(connection: socket.socket, ends: Sequence[bytes], limit: int, seconds: float) -> bytes:
    """Read until one of `ends` has come, at most `limit` bytes in all and for so long in all.

    Raises OSError, and ValueError for what is too long or not ended.
    """
    deadline = time.monotonic() + seconds
    data = b""
    while not any(end in data for end in ends):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it did not come in time")
        connection.settimeout(left)
        more = connection.recv(65536)
        if not more:
            raise ValueError("the connection ended before its end")
        data += more
        if len(data) > limit:
            raise ValueError(f"longer than {limit} bytes")
    return data


def listen(listener: socket.socket, path: Path, backlog: int, mode: int = 0o600) -> Identity | None:
    """Have a Unix stream socket listen at a path, for its owner alone. Returns what `identity` says of it then.

    The file is made in one step. Raises ConfigError if another process serves it there, or if it cannot be made; the
    socket is closed then.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.ExitStack() as failed:
        failed.callback(listener.close)
        if is_served(path):
            raise ConfigError(str(path), ["another agent serves this socket: stop it, or set runDir"])
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.unlink(missing_ok=True)
            failed.callback(fresh.unlink, missing_ok=True)
            listener.bind(str(fresh))
            os.chmod(fresh, mode)
            listener.listen(backlog)
            os.rename(fresh, path)  # so that a caller finds either the old socket or a served one
        except OSError as error:
            raise ConfigError(str(path), [f"cannot be made: {error.strerror or error}"]) from error
        failed.pop_all()
    return identity(path)


def identity(path: Path) -> Identity | None:
    """Tell one file from its successor of the same name; None if there is none. tmpfs reuses inodes, hence ctime."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def is_served(path: Path) -> bool:
    """Return whether a process listens at a path, though it may take nobody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # it has more callers than it has taken yet (unix(7), EAGAIN)
            return True
        except OSError:
            return False
        return True


def _end(listener: socket.socket) -> None:
    """Close a listener, and wake the thread that waits there."""
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def get(url: str, seconds: float) -> HTTPResponse:
    """Ask an address of this machine, whatever proxy the environment names for others.

    The environment of a node's shell often names one, and no_proxy seldom this machine. Raises HTTPError for an
    answer that is an error, OSError if nobody answers, Unavailable if what answers does not speak HTTP.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return cast(HTTPResponse, opener.open(url, timeout=seconds))
    except HTTPException as error:
        raise Unavailable(f"what answers at {url} does not speak HTTP") from error
