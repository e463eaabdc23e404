"""Pods whose network was taken down, and when to ask kubelet whether it lists them still.

kubelet counts a pod for a moment after its DEL, until its end has reached the API server, and tells nobody when that
is over. So it is asked some times, later and later; after that the usual look finds out.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from agent.ledger import Ledger
from agent.model.allocation import PodRef

PAUSES = (0.3, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds until kubelet is asked about a pod, and again, and again."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A pod of which a sandbox's network was taken down."""

    pod: PodRef
    at: float
    """When its DEL came, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    ended: Ended
    looks: int
    due: float
    """By a clock that nobody sets."""


class EndedPods:
    """Any thread may note pods; the rest is for the reconciler."""

    def __init__(
        self, ledger: Ledger, clock: Callable[[], float], uptime: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` tells the time as the books have it."""
        self._ledger = ledger
        self._clock = clock
        self._uptime = uptime
        self._guard = threading.Lock()
        self._waiting: dict[PodRef, _Waiting] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._noted = asyncio.Event()

    def note(self, pod: PodRef, spooled_at: float | None = None) -> None:
        """Note that a DEL has come for a pod, now or when it was put on disk. Does not block."""
        ended = Ended(pod, self._clock() if spooled_at is None else spooled_at)
        with self._guard:
            self._waiting[pod] = _Waiting(ended, 0, self._uptime() + PAUSES[0])
            loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._noted.set)

    def pods(self) -> tuple[Ended, ...]:
        """List the pods that kubelet may have stopped to list."""
        with self._guard:
            return tuple(waiting.ended for waiting in self._waiting.values())

    async def due(self) -> None:
        """Return when kubelet is to be asked."""
        with self._guard:
            self._loop = asyncio.get_running_loop()
        while True:
            self._noted.clear()
            with self._guard:
                first = min((waiting.due for waiting in self._waiting.values()), default=None)
            seconds = None if first is None else first - self._uptime()
            if seconds is not None and seconds <= 0:
                return
            try:
                async with asyncio.timeout(seconds):
                    await self._noted.wait()
            except TimeoutError:
                continue

    def looked(self) -> None:
        """Take note that kubelet was asked. Who holds nothing, or was asked about often enough, is forgotten."""
        grants, now = self._ledger.grants(), self._uptime()
        holders = {(grant.pod.namespace, grant.pod.name) for grant in grants if grant.pod is not None}
        any_unknown = any(grant.pod is None for grant in grants)
        with self._guard:
            for pod, waiting in tuple(self._waiting.items()):
                if waiting.due > now:
                    continue
                looks = waiting.looks + 1
                if looks == len(PAUSES) or not (any_unknown or (pod.namespace, pod.name) in holders):
                    del self._waiting[pod]
                else:
                    self._waiting[pod] = replace(waiting, looks=looks, due=now + PAUSES[looks])
