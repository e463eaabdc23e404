"""How long the steps of one call take."""

from __future__ import annotations

import time
from collections.abc import Callable

STEPS = ("plan", "books", "device", "ipam", "addresses")
"""Finding the device, writing the ledger, the PF and the moves, the IPAM plugin, addresses and routes."""


class Laps:
    """A stop-watch for one thread: each step lasts from the end of the one before."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._from = clock()
        self.taken: dict[str, float] = {}
        """What each step took so far, in seconds."""

    def end(self, step: str) -> None:
        """End a step. One that comes more than once adds up."""
        now = self._clock()
        self.taken[step] = self.taken.get(step, 0.0) + now - self._from
        self._from = now
