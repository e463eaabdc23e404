"""One lock for each device, so that nobody works on it while another does."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from agent.errors import DeviceBusy

LOCK_SECONDS = 30.0


class DeviceLocks:
    """Locks by the ledger's key."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    @contextmanager
    def hold(self, devices: Iterable[str], seconds: float = LOCK_SECONDS) -> Iterator[None]:
        """Hold the locks of some devices, taken in one order so that two calls cannot block each other."""
        with ExitStack() as stack:
            for device in sorted(set(devices)):
                with self._guard:
                    lock = self._locks.setdefault(device, threading.Lock())
                if not lock.acquire(timeout=seconds):
                    raise DeviceBusy(f"another call has been working on {device} for {seconds:g} s")
                stack.callback(lock.release)
            yield
