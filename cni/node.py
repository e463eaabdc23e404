"""What CNI works upon: the hardware, the books, the newest scan, and a lock for each device."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from agent.errors import DeviceBusy
from agent.hardware.host import Host
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from agent.state import Latest

LOCK_SECONDS = 30.0
STEPS = ("plan", "books", "device", "ipam", "addresses")
"""Of an ADD: finding the device, writing the ledger, the PF and the moves, the IPAM plugin, addresses and routes."""


class Observer:
    """Hears what is done with devices, on any thread. This one leaves it at the log."""

    def added(self, seconds: Mapping[str, float]) -> None:
        """An ADD has succeeded, and its steps (`STEPS`) took so long."""

    def not_told(self, pod: PodRef, what: str) -> None:
        """A pod has its devices, but something that its containers asked for is not told to them."""

    def not_put_back(self, device: str, what: str) -> None:
        """A device is back, but the host does not take back something that it had there, such as a route."""


class Node:
    """What all that attaches, detaches and looks shares. Safe for many threads."""

    def __init__(
        self, host: Host, ledger: Ledger, snapshot: Latest[Snapshot], observer: Observer | None = None
    ) -> None:
        self.host = host
        self.ledger = ledger
        self.scans = snapshot
        """The newest scan's cell."""
        self.observer = observer or Observer()
        self.locks = DeviceLocks()

    @property
    def snapshot(self) -> Snapshot:
        """The newest scan."""
        return self.scans.value


class DeviceLocks:
    """One lock for each device, by the ledger's key, so that nobody works on it while another does.

    One that nobody wants is forgotten: each interface made for a pod has another key.
    """

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
