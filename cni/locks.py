"""One lock for each device, so that nobody works on it while another does."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from agent.errors import DeviceBusy

LOCK_SECONDS = 30.0


class DeviceLocks:
    """Locks by the ledger's key. One that nobody wants is forgotten: each interface made for a pod has another key."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, _Wanted] = {}

    @contextmanager
    def hold(self, devices: Iterable[str], seconds: float = LOCK_SECONDS) -> Iterator[None]:
        """Hold the locks of some devices, taken in one order so that two calls cannot block each other."""
        with ExitStack() as stack:
            for device in sorted(set(devices)):
                with self._guard:
                    wanted = self._locks.setdefault(device, _Wanted())
                    wanted.by += 1
                stack.callback(self._want_no_more, device, wanted)
                if not wanted.lock.acquire(timeout=seconds):
                    raise DeviceBusy(f"another call has been working on {device} for {seconds:g} s")
                stack.callback(wanted.lock.release)
            yield

    def _want_no_more(self, device: str, wanted: _Wanted) -> None:
        with self._guard:
            wanted.by -= 1
            if not wanted.by:
                del self._locks[device]


class _Wanted:
    """A lock, and how many hold it or wait for it."""

    __slots__ = ("by", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by = 0
