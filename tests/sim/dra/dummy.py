"""A second DRA driver for claims that ask for more than ours: it prepares what was allocated, and moves nothing.

It is served as our own driver is. Its devices are real in slices and claims alone: its CDI names stand for no file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.errors import AgentError, Unavailable
from agent.model.allocation import ClaimRef
from agent.state import Latest
from deviceplugin.dra.door import DEFAULT_TIMES, Door, Driver, Times
from deviceplugin.dra.server import PreparedDevice
from deviceplugin.server import unobserved

ReadClaim = Callable[[str, str], Mapping[str, Any] | None]
"""Reads a ResourceClaim by namespace and name."""


class DummyClaims:
    """Prepares claims as told: at once, after a while, or not."""

    def __init__(self, driver: str, read: ReadClaim) -> None:
        self.prepared: dict[str, int] = {}
        """How often each claim that is prepared was asked for, by UID."""
        self.failing = 0
        """So many of the next Prepares fail."""
        self.seconds = 0.0
        """Each Prepare takes so long."""
        self._driver = driver
        self._read = read
        self._guard = threading.Lock()

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        time.sleep(self.seconds)
        with self._guard:
            if self.failing:
                self.failing -= 1
                raise AgentError("the dummy driver was told to fail")
            self.prepared[ref.uid] = self.prepared.get(ref.uid, 0) + 1
        document = self._read(ref.namespace, ref.name)
        if document is None:
            raise Unavailable(f"claim {ref} is gone")
        return tuple(self._device(ref, result) for result in _results(document) if result["driver"] == self._driver)

    def unprepare(self, ref: ClaimRef) -> None:
        with self._guard:
            self.prepared.pop(ref.uid, None)

    def _device(self, ref: ClaimRef, result: Mapping[str, Any]) -> PreparedDevice:
        return PreparedDevice(
            (result["request"].split("/")[0],),
            result["pool"],
            result["device"],
            (f"k8s.{self._driver}/claim={ref.uid}-{result['device']}",),
            result.get("shareID") or "",
        )


def dummy_door(claims: DummyClaims, driver: str, node: str, kubelet_dir: Path, times: Times = DEFAULT_TIMES) -> Door:
    """Make the door through which kubelet finds a dummy driver."""
    return Door(Driver(driver, node, kubelet_dir), claims, Latest(()), unobserved, times)


def _results(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = document["status"]["allocation"]["devices"]["results"]
    return found
