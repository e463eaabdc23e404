"""One at a time: steps that renumber RDMA devices, which are their moves and the binding anew of their drivers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from agent.errors import DeviceBusy

WAIT_SECONDS = 20.0
"""How long a device waits for another's step. A driver that hangs in one must not hold up every other pod for ever."""


class Renumbering:
    """A lock that a thread may take again while it has it, and that knows which device it is held for."""

    def __init__(self, seconds: float = WAIT_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.RLock()
        self._holder = ""

    @contextmanager
    def held(self, device: str) -> Iterator[None]:
        """Hold the lock for a device's step. Raises DeviceBusy if another's is not over in time."""
        if not self._lock.acquire(timeout=self._seconds):
            raise DeviceBusy(
                f"{device} has waited {self._seconds:g} s for the RDMA devices' numbers: {self._holder or 'another'}"
                " is still being moved or bound anew; if that goes on, look at dmesg for what its driver waits for"
            )
        outer, self._holder = self._holder, self._holder or device
        try:
            yield
        finally:
            self._holder = outer
            self._lock.release()
