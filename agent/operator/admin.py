"""The operator's socket, and that of kubelet's probes: one request and one answer per connection, a line of JSON each.

Only root (or whoever runs the agent, in a user namespace) is heard; size, time and number are bounded.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.errors import AgentError, ConfigError, InUse, RequestInvalid, Unavailable
from agent.process import sockets

if TYPE_CHECKING:
    from agent.report.endpoints import Check

MAX_REQUEST = 16 << 10
MAX_ANSWER = 64 << 10
RECEIVE_SECONDS = 5.0
ANSWER_SECONDS = 90.0
"""A driver and an IPAM plugin may take their time."""
MAX_CONNECTIONS = 4
BACKLOG = 16
"""So many more wait, for RECEIVE_SECONDS behind each four that say nothing; others are refused at once."""

log = logging.getLogger(__name__)
Answer = Callable[[Mapping[str, Any]], str]
"""Carries out a request, and tells what was done. Raises AgentError."""


class RequestRefused(AgentError):
    """The agent did not do what it was asked for."""

    reason = "RequestRefused"


class NotWell(AgentError):
    """A check does not hold."""

    reason = "NotWell"


class AdminServer(sockets.UnixServer):
    """Listens on the socket and answers."""

    def __init__(self, path: Path, answers: Mapping[str, Answer], receive_seconds: float = RECEIVE_SECONDS) -> None:
        """`answers`: command → what carries it out."""
        super().__init__(path, MAX_CONNECTIONS, BACKLOG)
        self._answers = answers
        self._receive_seconds = receive_seconds

    def serve(self, connection: socket.socket) -> None:
        """Carry out one request, and answer with what was done or why not."""
        request = json.loads(sockets.receive(connection, (b"\n",), MAX_REQUEST, self._receive_seconds))
        if not isinstance(request, dict):
            raise ValueError("not an object")
        answer = json.dumps(self._carry_out(request)).encode() + b"\n"
        connection.settimeout(self._receive_seconds)
        connection.sendall(answer)

    def _carry_out(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        command = request.get("command")
        try:
            if (answer := self._answers.get(str(command))) is None:
                raise RequestInvalid(f"command must be one of {', '.join(self._answers)}, is {command!r}")
            return {"done": answer(request)}
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
    server = AdminServer(path, {"healthz": _checking(health), "readyz": _checking(ready)})
    try:
        server.start()
    except ConfigError as error:
        log.error("probes are not answered: %s", error)
    try:
        yield
    finally:
        server.close(0)


def _checking(checks: Mapping[str, Check]) -> Answer:
    from agent.report.endpoints import run_checks  # not for a command that only asks

    def answer(request: Mapping[str, Any]) -> str:
        if wrong := [f"{name}: {what}" for name, what in run_checks(checks).items() if what is not None]:
            raise NotWell("; ".join(wrong))
        return "ok"

    return answer


def ask(path: Path, request: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> str:
    """Ask the running agent. Returns what it has done.

    Raises Unavailable if no agent listens or answers, and InUse, RequestInvalid or RequestRefused if it says no.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.settimeout(seconds)
            connection.connect(str(path))
            connection.sendall(json.dumps(dict(request)).encode() + b"\n")
            answer = json.loads(sockets.receive(connection, (b"\n",), MAX_ANSWER, seconds))
        except (OSError, ValueError) as error:
            raise Unavailable(f"the agent does not answer at {path}: {error}") from error
    if "done" in answer:
        return str(answer["done"])
    known: dict[Any, type[AgentError]] = {InUse.reason: InUse, RequestInvalid.reason: RequestInvalid}
    raise known.get(answer.get("reason"), RequestRefused)(str(answer.get("error")))
