"""One lock for each device, so that nobody works on it while another does."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from agent.errors import DeviceBusy

LOCK_SECONDS = 30.0


class DeviceLocks:
    """Locks by the ledger's key. One that nobody wants is forgotten: each interface made for a pod has another key."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, _Wanted] = {}

    def hold(self, devices: Iterable[str], seconds: float = LOCK_SECONDS) -> _Hold:
        """Return what holds the locks of some devices during a `with` block. DeviceBusy if they cannot be had.

        They are taken in one order, so that two calls cannot block each other.
        """
        return _Hold(self, sorted(set(devices)), seconds)

    def _take(self, device: str, seconds: float) -> None:
        with self._guard:
            wanted = self._locks.setdefault(device, _Wanted())
            wanted.by += 1
        if not wanted.lock.acquire(timeout=seconds):
            self._want_no_more(device, wanted)
            raise DeviceBusy(f"another call has been working on {device} for {seconds:g} s")

    def _let_go(self, device: str) -> None:
        wanted = self._locks[device]
        wanted.lock.release()
        self._want_no_more(device, wanted)

    def _want_no_more(self, device: str, wanted: _Wanted) -> None:
        with self._guard:
            wanted.by -= 1
            if not wanted.by:
                del self._locks[device]


class _Hold:
    __slots__ = ("_devices", "_locks", "_seconds")

    def __init__(self, locks: DeviceLocks, devices: list[str], seconds: float) -> None:
        self._locks = locks
        self._devices = devices
        self._seconds = seconds

    def __enter__(self) -> None:
        for number, device in enumerate(self._devices):
            try:
                self._locks._take(device, self._seconds)
            except BaseException:
                self._let_go(number)
                raise

    def __exit__(self, *_: object) -> None:
        self._let_go(len(self._devices))

    def _let_go(self, count: int) -> None:
        for device in reversed(self._devices[:count]):
            self._locks._let_go(device)


class _Wanted:
    """A lock, and how many hold it or wait for it."""

    __slots__ = ("by", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by = 0
