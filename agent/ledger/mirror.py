"""What the file holds of grants, attachments and bindings, once more in memory.

ADD asks several questions before it may touch anything, and a pod waits for the answers. After a pause
the processor has forgotten SQLite's code and pages, and each query takes a quarter of a millisecond; a
look into a dictionary does not. The ledger has one writer, which changes the mirror with each commit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class OfDevice(Protocol):
    """What a mirror holds: something about a device."""

    @property
    def device(self) -> str:
        """Its address."""


def _its_device(value: OfDevice) -> tuple[str, ...]:
    return (value.device,)


K = TypeVar("K")
V = TypeVar("V", bound=OfDevice)


class Mirror(Generic[K, V]):
    """Values by key and by device, for any thread."""

    def __init__(self, key: Callable[[V], K], devices: Callable[[V], Iterable[str]] = _its_device) -> None:
        """`devices` lists those that a value is about."""
        self._key = key
        self._devices = devices
        self._guard = threading.Lock()
        self._values: dict[K, V] = {}
        self._of_device: dict[str, dict[K, V]] = {}
        self._watchers: list[Callable[[V | None, V | None], None]] = []

    def watch(self, watcher: Callable[[V | None, V | None], None]) -> None:
        """Call `watcher` with each value before and after a change (None: not there). It must not block or raise."""
        self._watchers.append(watcher)

    def put(self, values: Iterable[V]) -> None:
        """Add values, or set them in place of those with the same key."""
        with self._guard:
            for value in values:
                key = self._key(value)
                former = self._drop(key, keep_place=True)
                self._values[key] = value
                for device in self._devices(value):
                    self._of_device.setdefault(device, {})[key] = value
                for watcher in self._watchers:
                    watcher(former, value)

    def remove(self, keys: Iterable[K]) -> None:
        """Forget what is there of these keys."""
        with self._guard:
            for key in keys:
                former = self._drop(key)
                for watcher in self._watchers if former is not None else ():
                    watcher(former, None)

    def get(self, key: K) -> V | None:
        """Return the value of a key."""
        with self._guard:
            return self._values.get(key)

    def all(self) -> tuple[V, ...]:
        """List all values, in the order in which their keys came."""
        with self._guard:
            return tuple(self._values.values())

    def of_device(self, device: str) -> tuple[V, ...]:
        """List a device's values, in the order in which their keys came."""
        with self._guard:
            return tuple(self._of_device.get(device, {}).values())

    def _drop(self, key: K, keep_place: bool = False) -> V | None:
        former = self._values.get(key)
        if former is None:
            return None
        for device in self._devices(former):
            siblings = self._of_device[device]
            del siblings[key]
            if not siblings:
                del self._of_device[device]
        if not keep_place:
            del self._values[key]
        return former
