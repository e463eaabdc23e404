"""What answers kubelet's probes (`agent.probe`): the checks of /healthz and /readyz, over a socket of their own.

It is open before the books are, and while a wrong configuration is waited out, when nobody listens for the operator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent.admin import AdminServer
from agent.endpoints import Check, run_checks
from agent.errors import AgentError, ConfigError, RequestInvalid

log = logging.getLogger(__name__)


class NotWell(AgentError):
    """A check does not hold."""

    reason = "NotWell"


@contextmanager
def served(path: Path | None, health: Mapping[str, Check], ready: Mapping[str, Check]) -> Iterator[None]:
    """Answer probes meanwhile, if there is a path. A socket that cannot be had is said, and kubelet finds nobody."""
    if path is None:
        yield
        return
    server = AdminServer(path, _answering({"healthz": health, "readyz": ready}))
    try:
        server.start()
    except ConfigError as error:
        log.error("probes are not answered: %s", error)
    try:
        yield
    finally:
        server.close()


def _answering(questions: Mapping[str, Mapping[str, Check]]) -> Callable[[Mapping[str, Any]], str]:
    def answer(request: Mapping[str, Any]) -> str:
        question = str(request.get("probe"))
        if question not in questions:
            raise RequestInvalid(f"probe must be one of {', '.join(questions)}, is {question!r}")
        wrong = [f"{name}: {what}" for name, what in run_checks(questions[question]).items() if what is not None]
        if wrong:
            raise NotWell("; ".join(wrong))
        return "ok"

    return answer
