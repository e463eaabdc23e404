"""The inventory: the newest frozen `Snapshot` of the node, rescanned on events and on a slow timer.

Followers wait for a newer generation and read the latest value. There is no queue, so no follower
can take another's event, and one that was late or failed recovers with the next snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from agent.errors import AgentError, HardwareError
from agent.hardware.host import Host
from agent.model.device import Problem, Snapshot

QUIET_SECONDS = 0.02
"""A burst of events is over when none came for so long."""
LONGEST_BURST_SECONDS = 0.1
"""A burst that goes on is looked at after so long nevertheless."""
MAX_PROBLEMS_LOGGED = 20

log = logging.getLogger(__name__)


class Inventory:
    """What the node has. All but `rescan_soon` belongs to the event loop's thread."""

    def __init__(self, host: Host, rescan_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._rescan_seconds = rescan_seconds
        self._clock = clock
        self._snapshot = Snapshot()
        self._changed = asyncio.Event()
        """Set and replaced at each new generation: whoever holds the old one is woken for good."""
        self._scanning = asyncio.Lock()
        self._begun = 0
        self._last_good = 0
        """Number of the last scan that did not fail."""
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.scans = 0
        """Scans finished so far."""
        self.scan_seconds = 0.0
        """How long the last scan took."""

    @property
    def snapshot(self) -> Snapshot:
        """The latest snapshot; generation 0 before the first scan."""
        return self._snapshot

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What the last scan could not read."""
        return self._snapshot.problems

    async def scan_now(self) -> Snapshot:
        """Return a snapshot that is not older than this call.

        Calls that wait for the same scan share it. Raises what the host raises; the previous
        snapshot stays then.
        """
        begun_before = self._begun
        async with self._scanning:
            if self._last_good > begun_before:
                return self._snapshot  # that scan began after this call
            self._begun += 1
            started = self._clock()
            try:
                found = await asyncio.to_thread(self._host.scan)
            finally:
                self.scan_seconds = self._clock() - started
                self.scans += 1
            self._last_good = self._begun
            self._publish(found)
            return self._snapshot

    async def newer_than(self, generation: int) -> Snapshot:
        """Wait for a snapshot newer than a generation, and return the latest."""
        while self._snapshot.generation <= generation:
            await self._changed.wait()
        return self._snapshot

    def rescan_soon(self, what: str = "") -> None:
        """Say that something may have changed. May be called from any thread; never blocks or raises."""
        loop = self._loop
        if loop is None:
            return  # `run` scans when it starts
        try:
            loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            return  # the loop is closed: the agent is ending
        log.debug("rescan: %s", what)

    async def run(self) -> None:
        """Follow the hardware until cancelled."""
        self._loop = asyncio.get_running_loop()
        watch = None
        try:
            try:
                watch = self._host.watch(self.rescan_soon)
            except HardwareError as error:
                log.error("changes are found by the timer alone, every %g s: %s", self._rescan_seconds, error)
            while True:
                # Before the scan: an event during the scan may be about something already read.
                self._event.clear()
                try:
                    await self.scan_now()
                except AgentError as error:
                    log.error("the scan failed, the previous snapshot stays: %s", error)
                # At most a fifth of the time goes into scans, however slow they are and however much pods come and go.
                await self._until_due(self._clock() + 4 * self.scan_seconds)
        finally:
            self._loop = None
            if watch is not None:
                await asyncio.to_thread(watch.close)

    async def _until_due(self, not_before: float) -> None:
        """Wait for an event and the end of its burst, or for the timer."""
        try:
            async with asyncio.timeout(self._rescan_seconds):
                await self._event.wait()
        except TimeoutError:
            return
        await asyncio.sleep(max(not_before - self._clock(), 0))
        try:
            async with asyncio.timeout(LONGEST_BURST_SECONDS):
                while self._event.is_set():
                    self._event.clear()
                    await asyncio.sleep(QUIET_SECONDS)
        except TimeoutError:
            return

    def _publish(self, found: Snapshot) -> None:
        self._log_problems(self._snapshot.problems, found.problems)
        old = self._snapshot
        if old.generation > 0 and found == old:
            return
        self._snapshot = replace(found, generation=old.generation + 1)
        woken, self._changed = self._changed, asyncio.Event()
        woken.set()

    def _log_problems(self, before: tuple[Problem, ...], now: tuple[Problem, ...]) -> None:
        """Say each problem once when it appears and once when it is gone."""
        if before == now:
            return
        new = [p for p in now if p not in set(before)]
        gone = [p for p in before if p not in set(now)]
        for problem in new[:MAX_PROBLEMS_LOGGED]:
            log.warning("scan: %s %s", problem.path, problem.text)
        for problem in gone[:MAX_PROBLEMS_LOGGED]:
            log.info("scan: %s is readable again or gone", problem.path)
        more = max(len(new) - MAX_PROBLEMS_LOGGED, 0), max(len(gone) - MAX_PROBLEMS_LOGGED, 0)
        if any(more):
            log.warning("scan: %d more problems appeared and %d more went", *more)
