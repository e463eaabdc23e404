"""The agent's end of the CNI socket: one request and one answer per connection.

Only root (or whoever runs the agent, in a user namespace) is heard; frames and time are bounded.
Each connection has a thread to itself: what a request does
is kernel and disk work that blocks. What may take long is counted where it begins to: `cni.attach` has places for ADDs
that have a device, `cni.held` for those that ask kubelet, and this module for CHECK and GC. All these together are
far fewer than connections, so STATUS, DEL and the ADD of a pod that has nothing of ours find one at any time.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from agent.errors import AgentError, EnvironmentInvalid, Unavailable
from agent.process import sockets
from cni import netconf, protocol
from cni.attachment import Attachments
from cni.call import Call
from cni.request import COMMANDS, NEWEST, failed, printed, version_of
from cni.request import read as request_of
from cni.result import in_version
from cni.turns import Places, Rules

MAX_CONNECTIONS = 256
MAX_SLOW = 8
"""So many CHECKs and GCs are in flight at once: either may wait for devices and plugins for a minute."""
WAITING_THREADS = 4
"""To start a thread for a request takes longer than to read it, and makes work for the kernel that an ADD waits for."""
RECEIVE_SECONDS = 10.0
"""For a request to come whole, and for its answer to be taken."""
BEAT_SECONDS = 1.0
END_SECONDS = 0.5
"""How long the end of the agent waits for requests under way."""
ACCEPT_PAUSE_SECONDS = 0.1
MAX_TOLD = 256
BACKLOG = 128

log = logging.getLogger(__name__)
Observe = Callable[[str], AbstractContextManager[object]]


class CniServer:
    """Listens on the CNI socket and answers."""

    def __init__(
        self,
        path: Path,
        attachments: Attachments,
        *,
        condition: Callable[[], str | None],
        observe: Observe,
        receive_seconds: float = RECEIVE_SECONDS,
    ) -> None:
        """`condition` tells why the agent cannot serve ADD now (for STATUS), or None."""
        self._path = path
        self._attachments = attachments
        self._condition = condition
        self._observe = observe
        self._receive_seconds = receive_seconds
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._slow = Places("CHECKs and GCs under way", Rules(MAX_SLOW))
        self._guard = threading.Lock()
        self._waiting = 0
        """How many threads wait for a connection."""
        self._told: set[tuple[str, str, int]] = set()
        """Type, name and keys, which may be thousands, of networks that were told of."""
        self._ending = threading.Event()
        self._beats = _Beats(self._ending)
        self._listener: socket.socket | None = None
        self._identity: tuple[int, int] | None = None
        """Of the socket's file."""
        self._is_short = False
        """No connection can be taken, which was said."""
        self._opening = threading.Lock()
        """Held while the listener becomes another one, or none."""

    def start(self, first: Callable[[], object] = lambda: None) -> None:
        """Listen, do something first, then answer. `first` must not raise: no relay puts a DEL on disk any more.

        Raises ConfigError if another agent listens there or the folder cannot be used.
        """
        self._beats.start()
        with self._opening:
            self._listener = self._open()
        first()
        for _ in range(WAITING_THREADS):
            self._hire()

    def stands(self) -> bool:
        """Tell whether relays still find this server: its socket's folder may be emptied. True once it is closed."""
        if self._ending.is_set():
            return True
        found = sockets.identity(self._path)
        return found is not None and found == self._identity

    def listen_anew(self) -> None:
        """Listen at the path again, and no longer where nobody finds it. Requests under way go on.

        Raises ConfigError as `start` does.
        """
        with self._opening:
            before = self._listener
            if before is None:
                return  # the end has come
            self._listener = self._open()
        _end(before)  # those who wait there come to the new one

    def _open(self) -> socket.socket:
        listener = _Listener(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        mode = protocol.BEATING_MODE if self._beats.is_running else 0o600
        self._identity = sockets.listen(listener, self._path, BACKLOG, mode)
        return listener

    def close(self, seconds: float = END_SECONDS) -> bool:
        """Stop listening, and wait a bounded time for requests under way. Returns whether all have ended.

        One that is not done by then, or that fails for want of what was closed, gets no answer: its
        relay asks the next agent, as if this one had been killed.
        """
        with self._opening:
            if self._listener is None:
                return True
            listener, stands = self._listener, self.stands()
            self._listener = None
            self._ending.set()
            if stands:  # else it is another agent's
                self._path.unlink(missing_ok=True)
            _end(listener)
        deadline = time.monotonic() + seconds
        slots = range(MAX_CONNECTIONS)
        return all(self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in slots)

    def _hire(self) -> None:
        try:
            threading.Thread(target=self._work, name="cni", daemon=True).start()
        except RuntimeError as error:  # no more threads: those there are carry on
            log.error("CNI requests have to wait for each other: %s", error)

    def _work(self) -> None:
        """Serve one connection after the other, for as long as threads are needed that wait for one."""
        while self._is_needed():
            self._slots.acquire()
            try:
                connection = self._take()
                if connection is None:
                    return
                self._serve(connection)
            finally:
                self._slots.release()

    def _is_needed(self) -> bool:
        with self._guard:
            if self._waiting >= WAITING_THREADS:
                return False
            self._waiting += 1
            return True

    def _take(self) -> socket.socket | None:
        """Wait for a connection, and see that somebody waits for the next. None at the end."""
        while (listener := self._listener) is not None:
            try:
                connection = listener.accept()[0]
                self._is_short = False
                break
            except OSError as error:
                if self._ending.is_set():
                    return None
                if listener is not self._listener:
                    continue
                # Out of descriptors or memory: nobody else would serve this socket, so carry on.
                if not self._is_short:
                    log.error("a CNI connection cannot be taken: %s", error)
                self._is_short = True
                self._ending.wait(ACCEPT_PAUSE_SECONDS)
        else:
            return None
        with self._guard:
            self._waiting -= 1
            is_last = self._waiting == 0
        if is_last:
            self._hire()
        return connection

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                uid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
                if uid != os.geteuid():
                    log.warning("refused a CNI request of user %d", uid)
                    return
                request = protocol.receive_request(connection, self._receive_seconds)
                try:
                    if request.env.get("CNI_COMMAND") == "ADD" and _has_hung_up(connection):
                        raise BrokenPipeError("nobody waits for this ADD any more, whose DEL may have come before it")
                    with self._beats.given(connection, request):
                        answer = self.answer(request)
                finally:
                    if request.netns is not None:
                        os.close(request.netns)
                if answer.exit == 0 or not self._ending.is_set():
                    protocol.send_answer(connection, answer, self._receive_seconds)
        except protocol.NothingSaid as error:
            log.debug("a CNI connection ended early: %s", error)
        except (OSError, protocol.FrameInvalid) as error:
            log.warning("a CNI connection ended early: %s", error)

    def answer(self, request: protocol.Request) -> protocol.Answer:
        """Do what a request asks for, whatever comes: every error becomes a CNI error object."""
        command = request.env.get("CNI_COMMAND", "")
        call: Call | None = None
        try:
            if command not in COMMANDS:
                raise EnvironmentInvalid(f"CNI_COMMAND must be one of {', '.join(COMMANDS)}, is {command!r}")
            with self._observe(command):
                if command == "VERSION":
                    return printed({"cniVersion": NEWEST, "supportedVersions": list(netconf.SUPPORTED_VERSIONS)})
                call = request_of(command, request)
                self._tell_of_ignored(call)
                return self._dispatch(command, call)
        except AgentError as error:
            # A runtime may ask for the status every few seconds.
            level = logging.DEBUG if command == "STATUS" else logging.ERROR
            log.log(level, "CNI %s of container %s failed: %s", command, request.env.get("CNI_CONTAINERID"), error)
            failure: Exception = error
        except Exception as error:
            log.exception("CNI %s met an unexpected error", command)
            failure = error
        return failed(command, call.conf.cni_version if call is not None else version_of(request), failure)

    def _dispatch(self, command: str, call: Call) -> protocol.Answer:
        if command == "ADD":
            result = self._attachments.add(call)
            version = call.conf.cni_version
            # An answer from the books may be of another version: the runtime was updated since.
            return printed(result if result.get("cniVersion") == version else in_version(result, version))
        if command == "DEL":
            self._attachments.delete(call)
        elif command == "CHECK":
            with self._slow.hold(command, call.conf.name):
                self._attachments.check(call)
        elif command == "GC":
            with self._slow.hold(command, call.conf.name):
                self._attachments.collect(call)
        else:
            # While this fails the whole node is not ready. Pods that have nothing need no more than this answer.
            if not call.conf.is_chained and (condition := self._condition()) is not None:
                raise Unavailable(condition)
            self._attachments.status(call)
        return protocol.Answer(0, b"")

    def _tell_of_ignored(self, call: Call) -> None:
        """Say once that a replaced plugin's configuration has keys without effect."""
        conf = call.conf
        if not conf.ignored:
            return
        said = conf.kind, conf.name, hash(conf.ignored)
        if said not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(said)
            log.warning(
                "network %s of type %s has keys that mean nothing: %s", conf.name, conf.kind, ", ".join(conf.ignored)
            )


class _Beats:
    """Tells relays each second that this process works on their requests, as one that is stopped or stuck does not.

    One thread is enough for all requests: one that waits for a driver may take its time.
    """

    def __init__(self, ending: threading.Event) -> None:
        self._ending = ending
        self._guard = threading.Lock()
        self._connections: set[socket.socket] = set()
        self.is_running = False

    def start(self) -> None:
        """Begin, once. Without a thread no beats are given, and none are promised."""
        if self.is_running:
            return
        try:
            threading.Thread(target=self._run, name="cni-beats", daemon=True).start()
            self.is_running = True
        except RuntimeError as error:
            log.error("relays will wait long for an agent that hangs: %s", error)

    @contextmanager
    def given(self, connection: socket.socket, request: protocol.Request) -> Iterator[None]:
        """Give beats meanwhile, if the relay wants them. None comes later, inside the answer."""
        if not request.wants_beats:
            yield
            return
        connection.settimeout(None)  # it was for the request
        with self._guard:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._guard:
                self._connections.discard(connection)

    def _run(self) -> None:
        while not self._ending.wait(BEAT_SECONDS):
            with self._guard:
                for connection in self._connections:
                    with suppress(OSError):  # nobody waits any more
                        protocol.send_beat(connection)


class _Listener(socket.socket):
    """Accepts sooner: the properties in place of these look their values up in enumerations, for each connection."""

    family = socket.AF_UNIX
    type = socket.SOCK_STREAM


def _end(listener: socket.socket) -> None:
    """Close a listener, and wake those who wait there."""
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _has_hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)  # a hang-up is told in any case
    return bool(poll.poll(0))
