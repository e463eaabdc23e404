"""The agent's end of the CNI socket: one request and one answer per connection.

Only root (or whoever runs the agent, in a user namespace) is heard; frames and time are bounded.
Each connection has a thread to itself (`agent.process.sockets`): what a request does is kernel and disk work that
blocks. What may take long is counted where it begins to: `cni.attach` limits ADDs
that have a device, `cni.pod_devices` those that ask kubelet, and this module CHECK and GC. All these together are
far fewer than connections, so STATUS, DEL and the ADD of a pod that has nothing of ours find one at any time.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from agent.errors import AgentError, EnvironmentInvalid, Unavailable
from agent.process import sockets
from cni import netconf, protocol
from cni.attachment import Attachments
from cni.call import Call
from cni.call_limits import Rules, Turns
from cni.request import COMMANDS, NEWEST, failed, printed, version_of
from cni.request import read as request_of
from cni.result import in_version

MAX_CONNECTIONS = 256
MAX_SLOW = 8
"""So many CHECKs and GCs are in flight at once: either may wait for devices and plugins for a minute."""
RECEIVE_SECONDS = 10.0
"""For a request to come whole, and for its answer to be taken."""
BEAT_SECONDS = 1.0
MAX_REPORTED = 256
BACKLOG = 128

log = logging.getLogger(__name__)
Observe = Callable[[str], AbstractContextManager[object]]


class CniServer(sockets.UnixServer):
    """Listens on the CNI socket and answers.

    A request that is not done when the server closes, or fails for want of what was closed, gets no answer: its relay
    asks the next agent, as if this one had been killed.
    """

    def __init__(
        self,
        path: Path,
        attachments: Attachments,
        *,
        condition: Callable[[], str | None],
        observe: Observe,
        receive_seconds: float = RECEIVE_SECONDS,
    ) -> None:
        """`condition` returns why the agent cannot serve ADD now (for STATUS), or None."""
        super().__init__(path, MAX_CONNECTIONS, BACKLOG)
        self._attachments = attachments
        self._condition = condition
        self._observe = observe
        self._receive_seconds = receive_seconds
        self._slow = Turns("CHECKs and GCs under way", Rules(MAX_SLOW))
        self._reported: set[tuple[str, str, int]] = set()
        """Type, name and keys, which may be thousands, of networks whose ignored keys were reported."""
        self._beats = _Beats(self.ending)

    def start(self, first: Callable[[], object] = lambda: None, mode: int = protocol.BEATING_MODE) -> None:
        """Listen, do something first (no relay puts a DEL on disk any more), then answer. Raises ConfigError."""
        self._beats.start()
        super().start(first, mode if self._beats.is_running else 0o600)

    def serve(self, connection: socket.socket) -> None:
        """Answer one request."""
        try:
            request = protocol.receive_request(connection, self._receive_seconds)
        except protocol.NothingSaid:
            return
        try:
            if request.env.get("CNI_COMMAND") == "ADD" and _has_hung_up(connection):
                raise BrokenPipeError("nobody waits for this ADD any more, whose DEL may have come before it")
            with self._beats.given(connection, request):
                answer = self.answer(request)
        finally:
            if request.netns is not None:
                os.close(request.netns)
        if answer.exit == 0 or not self.ending.is_set():
            protocol.send_answer(connection, answer, self._receive_seconds)

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
                self._report_ignored(call)
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

    def _report_ignored(self, call: Call) -> None:
        """Say once that a replaced plugin's configuration has keys without effect."""
        conf = call.conf
        if not conf.ignored:
            return
        key = conf.kind, conf.name, hash(conf.ignored)
        if key not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add(key)
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


def _has_hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)  # a hang-up is reported in any case
    return bool(poll.poll(0))
