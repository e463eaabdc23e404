"""The inventory: the newest frozen `Snapshot` of the node, brought up to date on events and scanned on a slow timer.

An event names what changed, and only that is read again; all is read at the start, on the timer, and
when nobody can say what changed. Followers wait for another snapshot in its cell, and read the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from agent.config import Placement
from agent.errors import AgentError, HardwareError
from agent.hardware.adapter_ids import AdapterIds, read_adapter_id
from agent.hardware.host import Host, Watch
from agent.hardware.sysfs.scan import with_nccl_topology
from agent.model.change import EVERYTHING, NOTHING, Change
from agent.model.device import PciDevice, Problem, Snapshot
from agent.state import Latest

QUIET_SECONDS = 0.02
"""A burst of events is over when none came for so long."""
MOST_WAITS = 3
"""A burst that goes on is looked at after so many times nevertheless."""
POLL_SECONDS = 2.0
"""Between two looks for changes without an event, and for events that cannot be heard."""
DEFAULT_RESCAN_SECONDS = 60.0
MAX_PROBLEMS_LOGGED = 20

log = logging.getLogger(__name__)


class Inventory:
    """What the node has. All but `rescan_soon` belongs to the event loop's thread."""

    def __init__(
        self,
        host: Host,
        rescan_seconds: float = DEFAULT_RESCAN_SECONDS,
        *,
        silent_changes: Callable[[Snapshot], Change] = lambda _: NOTHING,
        complain: Callable[[str | None], None] = lambda _: None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`silent_changes` returns what changed since a snapshot without any event; it blocks briefly."""
        self._host = host
        self._silent_changes = silent_changes
        self.complain = complain
        """Gets which events cannot be heard, and None while all are."""
        self._poll_seconds = poll_seconds
        self._placement = Placement()
        self._adapter_ids = AdapterIds(lambda address: read_adapter_id(host.root, address), self.rescan_soon)
        self.rescan_seconds = rescan_seconds
        self.snapshot = Latest(Snapshot())
        """The latest snapshot; generation 0 before the first scan."""
        self._scanning = asyncio.Lock()
        self._reading = asyncio.Lock()
        """Held by a small look until it is published, and while a scan's result is: looks go on during a scan."""
        self._meanwhile = NOTHING
        """What was looked at since the last scan began, which may have read that before it changed."""
        self._guard = threading.Lock()
        self._changed = NOTHING
        """What events named and nobody looked at yet."""
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: Watch | None = None
        self._scan: asyncio.Task[Snapshot] | None = None
        """The scan under way that `run` has begun."""
        self.scans = 0
        """Full scans finished so far."""
        self.scan_seconds = 0.0
        """How long the last full scan took."""

    async def scan_now(self) -> Snapshot:
        """Return a snapshot that is not older than this call.

        Raises what the host raises; the previous snapshot stays then.
        """
        async with self._scanning:
            started = time.monotonic()
            self._take_changed()  # this scan sees it
            self._meanwhile = NOTHING
            try:
                found = await asyncio.to_thread(self._look_at_all)
                async with self._reading:
                    if self._meanwhile:
                        found = await asyncio.to_thread(self._look_at, found, self._meanwhile)
                    self._publish(found)
            finally:
                self.scan_seconds = time.monotonic() - started
                self.scans += 1
            return self.snapshot.value

    def heed(self, placement: Placement) -> None:
        """Go by what the configuration says of GPUs, from now on."""
        if placement != self._placement:
            self._placement = placement
            self.rescan_soon("another configuration")

    def _look_at_all(self) -> Snapshot:
        """Scan, and add what the configuration says. A small look keeps that."""
        placement, found = self._placement, self._host.scan()
        placed = with_nccl_topology(replace(found, gpu_ids=placement.gpu_ids), placement.topology_file)
        return self._adapter_ids.added_to(placed)

    def _look_at(self, known: Snapshot, change: Change) -> Snapshot:
        return self._adapter_ids.added_to(self._host.rescan(known, change))

    async def begin(self) -> Snapshot:
        """Hear the kernel from now on, and scan. `run` need not scan at once then. Raises what the host raises."""
        if self._watch is None:
            with contextlib.suppress(HardwareError):  # `run` tries again, and says so
                self._watch = self._host.watch(self.rescan_soon)
        return await self.scan_now()

    async def close(self) -> None:
        """Hear the kernel no more. `run` ends with that."""
        watch, self._watch = self._watch, None
        if watch is not None:
            await asyncio.to_thread(watch.close)

    def rescan_soon(self, what: str = "", change: Change = EVERYTHING) -> None:
        """Say that something may have changed. May be called from any thread; never blocks or raises."""
        with self._guard:
            first, self._changed = not self._changed, self._changed | change
        loop = self._loop
        if loop is None:
            return  # `run` looks when it starts
        if first:
            try:
                loop.call_soon_threadsafe(self._event.set)
            except RuntimeError:
                return  # the loop is closed: the agent is ending
        log.debug("changed: %s", what)

    async def run(self) -> None:
        """Follow the hardware until cancelled."""
        is_begun = self._watch is not None and not self._watch.unheard and self.snapshot.value.generation > 0
        self._loop = asyncio.get_running_loop()
        self._event.set()
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._listen(), name="kernel events"),  # the first scan comes after its first step
            asyncio.create_task(self._follow(self.rescan_seconds if is_begun else 0.0), name="scans"),
            asyncio.create_task(self._poll(), name="silent changes"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._loop = None
            tasks += [self._scan] if self._scan is not None else []
            self._scan = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        """Have the host call at events. What cannot be heard is reported, and tried again on the timer."""
        missed = False
        while True:
            unheard: Sequence[str] = ()
            try:
                try:
                    self._watch = self._watch or self._host.watch(self.rescan_soon)
                except HardwareError as error:
                    unheard = (str(error),)
                if missed:
                    self.rescan_soon("some events were not heard before")
                while self._watch is not None and not (unheard := self._watch.unheard):
                    self.complain(None)
                    await asyncio.sleep(self._poll_seconds)
                timer = f"changes are found by the timer alone, every {self.rescan_seconds:g} s"
                self.complain("; ".join((*unheard, timer)))
                await asyncio.sleep(self.rescan_seconds)
            finally:
                await self.close()
            missed = True

    async def _follow(self, seconds: float) -> None:
        """Scan after some seconds and then on the timer, and look at what events name, once their burst is over.

        A scan that a dying adapter holds up keeps nobody from small looks: they tell how the others are.
        """
        due, not_before = time.monotonic() + seconds, 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - time.monotonic() if self._scan is None else None):
                    await self._event.wait()
                    await self._burst()
            self._event.clear()
            if self._scan is not None and self._scan.done():
                if (failed := self._scan.exception()) is not None:
                    if not isinstance(failed, AgentError):
                        raise failed
                    log.error("the scan failed, the previous snapshot stays: %s", failed)
                self._scan = None
                # At most a fifth of the time goes into scans, however slow they are and however often they are wanted.
                not_before = time.monotonic() + 4 * self.scan_seconds
                due = min(max(due, not_before), time.monotonic() + self.rescan_seconds)
            change, began = self._take_changed(), time.monotonic()
            try:
                if change.everything:
                    due = min(due, max(not_before, began))
                elif self.snapshot.value.generation == 0:
                    self._meanwhile |= change  # the first scan looks at it in its end
                elif change:
                    await self._update(change)
                    await asyncio.sleep(time.monotonic() - began)  # not all of the time goes into looks
            except AgentError as error:
                log.error("what changed could not be read, so all will be: %s", error)
                due = min(due, max(not_before, began))
            if self._scan is None and time.monotonic() >= due:
                due = math.inf
                self._scan = asyncio.create_task(self.scan_now(), name="scan")
                self._scan.add_done_callback(lambda _: self._event.set())

    async def _poll(self) -> None:
        """Look for changes without an event."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            change = await asyncio.to_thread(self._silent_changes, self.snapshot.value)
            if change:
                self.rescan_soon("a port changed", change)

    async def _burst(self) -> None:
        """Wait for the end of a burst of events."""
        for _ in range(MOST_WAITS):
            before = self._changed
            await asyncio.sleep(QUIET_SECONDS)
            if self._changed == before:
                return

    def _take_changed(self) -> Change:
        with self._guard:
            change, self._changed = self._changed, NOTHING
        return change

    async def _update(self, change: Change) -> None:
        async with self._reading:
            self._meanwhile |= change
            self._publish(await asyncio.to_thread(self._look_at, self.snapshot.value, change))

    def _publish(self, found: Snapshot) -> None:
        self._log_problems(self.snapshot.value.problems, found.problems)
        old = self.snapshot.value
        if old.generation > 0 and found == old:
            return
        self.snapshot.set(replace(found, devices=_same_objects(old, found), generation=old.generation + 1))

    def _log_problems(self, before: tuple[Problem, ...], now: tuple[Problem, ...]) -> None:
        """Say each problem once when it appears and once when it is gone."""
        if before == now:
            return
        new = [p for p in now if p not in set(before)]
        gone = [p for p in before if p not in set(now)]
        for problem in new[:MAX_PROBLEMS_LOGGED]:
            log.warning("scan: %s %s", problem.path, problem.text)
        if len(new) > MAX_PROBLEMS_LOGGED:
            log.warning("scan: %d more problems appeared", len(new) - MAX_PROBLEMS_LOGGED)
        for problem in gone[:MAX_PROBLEMS_LOGGED]:
            log.info("scan: %s is readable again or gone", problem.path)


def _same_objects(old: Snapshot, found: Snapshot) -> tuple[PciDevice, ...]:
    """List the devices found, those that did not change as the same objects: whoever compares has less to do."""
    known = old.by_address
    return tuple(k if (k := known.get(d.address)) is not None and (k is d or k == d) else d for d in found.devices)
