"""What drivers said of their devices' health, and since when. Part of the stand-in.

The clock starts when kubelet hears, whatever time the driver wrote. What is older than its timeout reads Unknown, and
so does a device that was left out for so long. When a stream ends all is forgotten, and nobody is told. Source:
Kubernetes 1.36, pkg/kubelet/cm/dra/healthinfo.go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from proto.drahealth.v1alpha1 import api_pb2

TIMEOUT_SECONDS = 30.0
MOST_MESSAGE = 1024

UNKNOWN = "Unknown"
_WORDS = {api_pb2.HEALTHY: "Healthy", api_pb2.UNHEALTHY: "Unhealthy"}


@dataclass(frozen=True, slots=True)
class Heard:
    """The health of one device."""

    health: str
    message: str = ""
    timeout: float = TIMEOUT_SECONDS
    """Seconds."""


NOTHING = Heard(UNKNOWN)
_Key = tuple[str, str, str]


class HealthCache:
    """Health by driver, pool and device."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[_Key, tuple[Heard, float]] = {}

    def read(self, driver: str, pool: str, device: str) -> Heard:
        """Tell what counts now."""
        heard, since = self._heard.get((driver, pool, device), (NOTHING, 0.0))
        return heard if self._clock() - since <= heard.timeout else NOTHING

    def update(self, driver: str, devices: Iterable[api_pb2.DeviceHealth]) -> set[tuple[str, str]]:
        """Take a driver's newest list. Returns (pool, device) of those whose health is another than before."""
        now = self._clock()
        changed: set[tuple[str, str]] = set()
        told: set[_Key] = set()
        for device in devices:
            key = (driver, device.device.pool_name, device.device.device_name)
            told.add(key)
            heard = _heard(device)
            before, _ = self._heard.get(key, (None, 0.0))
            if before != heard:
                changed.add(key[1:])
            self._heard[key] = heard, now
        for key, (before, since) in list(self._heard.items()):
            if key[0] == driver and key not in told and before != NOTHING and now - since > before.timeout:
                self._heard[key] = NOTHING, now
                changed.add(key[1:])
        return changed

    def clear(self, driver: str) -> None:
        """Forget what a driver said: its stream has ended."""
        self._heard = {key: value for key, value in self._heard.items() if key[0] != driver}


def _heard(device: api_pb2.DeviceHealth) -> Heard:
    timeout = device.health_check_timeout_seconds
    message = device.message
    if len(message.encode()) > MOST_MESSAGE:
        message = message.encode()[: MOST_MESSAGE - 3].decode(errors="replace") + "..."
    return Heard(_WORDS.get(device.health, UNKNOWN), message, timeout if timeout > 0 else TIMEOUT_SECONDS)
