"""What pods hold, by kubelet's PodResources, so that a preference need not ask.

kubelet never says that a unit came back, nor what other plugins hand out. PodResources do, but only to who asks,
and nobody may ask while kubelet waits. So every answer that anybody had is taken in; and where nobody asks after the
books have changed, kubelet is asked here, a moment later: one question for all the pods that start together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from dataclasses import dataclass

from agent.errors import Unavailable
from agent.kubelet.podresources import PodResources
from agent.ledger import Ledger
from agent.model.device import Snapshot
from agent.state import Latest
from deviceplugin.allocation import Allocator

SHOWN_SECONDS = 0.1
"""After so long kubelet tells of what it has granted."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Times:
    """When kubelet is asked."""

    settle: float = 1.0
    """An admission's grants follow each other; the last one's pod is to be in the answer."""
    pause: float = 2.0
    """Between two questions."""
    look: float = 60.0
    """So old an answer may become: what other plugins give out, and take back, changes none of our books."""


DEFAULT_TIMES = Times()


class Usage:
    """Tells the allocator what pods hold, on a node with GPUs. `run` until cancelled."""

    def __init__(
        self,
        kubelet: PodResources,
        allocator: Allocator,
        snapshot: Latest[Snapshot],
        ledger: Ledger,
        times: Times = DEFAULT_TIMES,
    ) -> None:
        self._kubelet = kubelet
        self._allocator = allocator
        self._snapshot = snapshot
        self._ledger = ledger
        self._times = times
        self._changed = asyncio.Event()
        self._wanted = -math.inf
        """An answer that is older is no good any more, by kubelet's clock."""

    async def run(self) -> None:
        """Take in what kubelet tells, and see to it that it is asked after each change and now and then."""
        loop = asyncio.get_running_loop()

        def note() -> None:
            with contextlib.suppress(RuntimeError):  # the ledger may outlive the loop
                loop.call_soon_threadsafe(self._note_change)

        self._ledger.subscribe(note)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_in(), name="usage")
            tasks.create_task(self._ask(), name="questions about usage")

    def _note_change(self) -> None:
        self._wanted = self._kubelet.clock() + SHOWN_SECONDS
        self._changed.set()

    async def _take_in(self) -> None:
        found = self._kubelet.newest.value
        while True:
            if found.asked_at > -math.inf and self._snapshot.value.all_gpus:
                self._allocator.heard(found.pods, found.asked_at)
            found = await self._kubelet.newest.other_than(found)

    async def _ask(self) -> None:
        """Ask for ever. A kubelet that does not answer is asked next time."""
        self._wanted = self._kubelet.clock()
        while True:
            self._changed.clear()
            try:
                if self._snapshot.value.all_gpus:
                    await self._kubelet.listing(self._wanted)
            except Unavailable as error:
                log.debug("what pods hold stays as it was known: %s", error)
            await asyncio.sleep(self._times.pause)
            try:
                async with asyncio.timeout(self._times.look):
                    await self._changed.wait()
            except TimeoutError:
                self._wanted = self._kubelet.clock() - self._times.look
            else:
                await asyncio.sleep(self._times.settle)
