"""Whether the event loop, which answers kubelet, still runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BEAT_SECONDS = 1.0
STUCK_SECONDS = 20.0


class Heartbeat:
    """Beats on the event loop; any thread may ask whether it still does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at: float | None = None

    async def run(self) -> None:
        """Beat for ever."""
        while True:
            self._at = self._clock()
            await asyncio.sleep(BEAT_SECONDS)

    def stopped(self) -> str | None:
        """Tell for how long the loop has stood still, if that is too long. It has not before the first beat."""
        still = self._clock() - self._at if self._at is not None else 0.0
        return f"the event loop has stood still for {still:.0f} s" if still > STUCK_SECONDS else None
