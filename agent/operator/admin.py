"""The operator's socket, and that of kubelet's probes: one request and one answer per connection, a line of JSON each.

Only root (or whoever runs the agent, in a user namespace) is heard; size, time and number are bounded.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.errors import AgentError, ConfigError, RequestInvalid, Unavailable
from agent.process import sockets

if TYPE_CHECKING:
    from agent.report.replies import Check

MAX_REQUEST = 16 << 10
MAX_ANSWER = 64 << 10
RECEIVE_SECONDS = 5.0
ANSWER_SECONDS = 90.0
"""A driver and an IPAM plugin may take their time."""
MAX_CONNECTIONS = 4

log = logging.getLogger(__name__)
Answer = Callable[[Mapping[str, Any]], str]
"""Carries out a request, and tells what was done. Raises AgentError."""


class RequestRefused(AgentError):
    """The agent did not do what it was asked for. `told_reason` is its word for why."""

    reason = "RequestRefused"

    def __init__(self, text: str, told_reason: str) -> None:
        self.told_reason = told_reason
        super().__init__(text)


class NotWell(AgentError):
    """A check does not hold."""

    reason = "NotWell"


class AdminServer:
    """Listens on the socket and answers, on threads of its own."""

    def __init__(self, path: Path, answer: Answer, receive_seconds: float = RECEIVE_SECONDS) -> None:
        self._path = path
        self._answer = answer
        self._receive_seconds = receive_seconds
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._listener: socket.socket | None = None
        self._identity: tuple[int, int] | None = None
        """Of the socket's file."""

    def start(self) -> None:
        """Listen. Raises ConfigError if another agent listens there, or the socket cannot be made."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._identity = sockets.listen(listener, self._path, MAX_CONNECTIONS)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="admin", daemon=True).start()

    def close(self) -> None:
        """Stop listening. A request under way is carried on, and its answer may be lost."""
        if self._listener is not None:
            if sockets.identity(self._path) == self._identity:  # else it is another agent's
                self._path.unlink(missing_ok=True)
            listener, self._listener = self._listener, None
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection = listener.accept()[0]
            except OSError as error:
                if self._listener is listener:
                    log.error("an operator's connection cannot be taken: %s", error)
                    time.sleep(0.1)
                continue
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="admin", daemon=True).start()
            except RuntimeError as error:  # no thread for this one; the socket stays for the next
                log.error("an operator's connection cannot be served: %s", error)
                self._slots.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                uid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
                if uid != os.geteuid():
                    log.warning("refused an operator's request of user %d", uid)
                    return
                request = json.loads(_receive(connection, MAX_REQUEST, self._receive_seconds))
                if not isinstance(request, dict):
                    raise ValueError("not an object")
                connection.settimeout(self._receive_seconds)
                connection.sendall(json.dumps(self._carry_out(request)).encode() + b"\n")
        except (OSError, ValueError, RecursionError) as error:
            log.warning("an operator's connection ended early: %s", error)
        finally:
            self._slots.release()

    def _carry_out(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return {"done": self._answer(request)}
        except AgentError as error:
            return {"error": str(error), "reason": error.reason}
        except Exception as error:
            log.exception("an operator's request met an unexpected error")
            return {"error": f"unexpected error: {error}", "reason": "Internal"}


@contextmanager
def answering_probes(path: Path | None, health: Mapping[str, Check], ready: Mapping[str, Check]) -> Iterator[None]:
    """Answer kubelet's probes (`agent.operator.probe`) meanwhile, over a socket of their own, if there is a path.

    It is open before the books are, and while a wrong configuration is waited out, when nobody listens for the
    operator. A socket that cannot be had is said, and kubelet finds nobody.
    """
    if path is None:
        yield
        return
    server = AdminServer(path, _checking({"healthz": health, "readyz": ready}))
    try:
        server.start()
    except ConfigError as error:
        log.error("probes are not answered: %s", error)
    try:
        yield
    finally:
        server.close()


def _checking(questions: Mapping[str, Mapping[str, Check]]) -> Answer:
    from agent.report.replies import run_checks  # not for a command that only asks

    def answer(request: Mapping[str, Any]) -> str:
        question = str(request.get("probe"))
        if question not in questions:
            raise RequestInvalid(f"probe must be one of {', '.join(questions)}, is {question!r}")
        wrong = [f"{name}: {what}" for name, what in run_checks(questions[question]).items() if what is not None]
        if wrong:
            raise NotWell("; ".join(wrong))
        return "ok"

    return answer


def ask(path: Path, request: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> str:
    """Ask the running agent. Returns what it has done.

    Raises Unavailable if no agent listens or answers, RequestRefused if it says no.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.settimeout(seconds)
            connection.connect(str(path))
            connection.sendall(json.dumps(dict(request)).encode() + b"\n")
            answer = json.loads(_receive(connection, MAX_ANSWER, seconds))
        except (OSError, ValueError) as error:
            raise Unavailable(f"the agent does not answer at {path}: {error}") from error
    if "done" in answer:
        return str(answer["done"])
    raise RequestRefused(str(answer.get("error")), str(answer.get("reason")))


def _receive(connection: socket.socket, limit: int, seconds: float) -> bytes:
    """Read a line. Raises ValueError for one that is too long or not ended, OSError."""
    deadline = time.monotonic() + seconds
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it did not come in time")
        connection.settimeout(left)
        more = connection.recv(65536)
        if not more:
            raise ValueError("the connection ended inside a line")
        data += more
        if len(data) > limit:
            raise ValueError(f"longer than {limit} bytes")
    return data
