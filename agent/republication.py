"""The publications of the moment's configuration: another configuration ends them, and others begin.

Pods need nothing that is published. So publications that fail with an error that nobody expected end neither the
agent nor themselves for good: that is said, and after a while they begin anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from agent.config import Topology

AGAIN_SECONDS = 60.0

log = logging.getLogger(__name__)


def _told_nobody(what: str | None) -> None:
    return None


class Published(Protocol):
    """What `agent.publication.Publications` offers."""

    def changed(self) -> None:
        """Say that units or pods may have changed."""

    async def run(self) -> None:
        """Publish until cancelled."""


class Republication:
    """Publishes as the configuration says. `run` until cancelled; `changed` may be called from any thread."""

    def __init__(
        self,
        make: Callable[[Topology], Published],
        topology: Topology,
        *,
        complain: Callable[[str | None], None] = _told_nobody,
        again_seconds: float = AGAIN_SECONDS,
    ) -> None:
        """`make` makes the publications of a configuration; they are not run yet. `complain` is told if they fail."""
        self._make = make
        self._complain = complain
        self._again_seconds = again_seconds
        self._topology = topology
        self._current = make(topology)
        self._another = asyncio.Event()

    def changed(self) -> None:
        """Say that units or pods may have changed."""
        self._current.changed()

    def reconfigure(self, topology: Topology) -> None:
        """Publish as another configuration says. What the former one put into objects is taken back by the next."""
        if topology != self._topology:
            self._topology = topology
            self._another.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            running = asyncio.create_task(self._current.run(), name="publications")
            another = asyncio.create_task(self._another.wait(), name="another configuration")
            try:
                await asyncio.wait((running, another), return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    failure = running.exception()
                    if not isinstance(failure, Exception):
                        return running.result()
                    log.error("publications failed, and begin anew in %g s", self._again_seconds, exc_info=failure)
                    self._complain(f"failed unexpectedly, which the log tells more of: {type(failure).__name__}")
                    await asyncio.wait((another,), timeout=self._again_seconds)
                    self._complain(None)
            finally:
                another.cancel()
                running.cancel()
                await asyncio.gather(running, another, return_exceptions=True)
            self._another.clear()
            self._current = self._make(self._topology)
