"""The pods of new grants, learnt soon.

kubelet does not say for whom it asks, and tells its PodResources some ten milliseconds after the answer. Until then any
pod of the node may be the one that has the device, and none starts without the agent. So kubelet is asked a few times
at growing intervals; a grant whose pod is not told by then is the reconciler's, as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence

from agent.errors import AgentError
from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.reconcile.grants import Bind, decide
from agent.reconcile.view import Outside
from cni.holders import Holders

PAUSES = (0.1, 0.3, 1.0)
"""Seconds before each time that kubelet is asked, which answers from memory."""

log = logging.getLogger(__name__)


class Owners:
    """Names the pods of grants while there are some that nobody is known to have. `run` until cancelled."""

    def __init__(self, ledger: Ledger, holders: Holders, outside: Outside, pauses: Sequence[float] = PAUSES) -> None:
        self._ledger = ledger
        self._holders = holders
        self._outside = outside
        self._pauses = pauses

    async def run(self) -> None:
        """Ask kubelet after each change of the books, a few times, for as long as a grant's pod is unknown."""
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def note() -> None:
            if self._holders.has_unknown:
                with contextlib.suppress(RuntimeError):  # the ledger may outlive the loop
                    loop.call_soon_threadsafe(changed.set)

        self._ledger.subscribe(note)
        note()
        while True:
            await changed.wait()
            changed.clear()
            for pause in self._pauses:
                await asyncio.sleep(pause)
                if not self._holders.has_unknown:
                    break
                asked_at = self._outside.now()
                try:
                    await asyncio.to_thread(self._bind, await self._outside.held_units(), asked_at)
                except AgentError as error:
                    log.debug("the pods of new grants are not known yet: %s", error)

    def _bind(self, held_units: Sequence[HeldUnit], asked_at: float) -> None:
        """Name the pods that hold granted units. What else there is to settle is left to the reconciler."""
        units: dict[PodRef, list[str]] = {}
        for action in decide(
            self._ledger.grants(),
            held_units,
            offered=None,
            attached=(),
            moved={},
            asked_at=asked_at,
            unclaimed_before=-math.inf,
        ):
            if isinstance(action, Bind):
                units.setdefault(action.held.pod, []).append(action.held.unit_id)
        for pod, unit_ids in units.items():
            self._ledger.bind(unit_ids, pod)
            self._outside.count("grant-bind", "claimed")
