"""The pods of new grants, learnt soon.

kubelet does not say for whom it asks, and tells its PodResources some ten milliseconds after the answer. Until then any
pod of the node may be the one that has the device, and none starts without the agent. So kubelet is asked a few times
at growing intervals; a grant whose pod is not told by then is the reconciler's, as any other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from agent.errors import AgentError
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.reconcile.grants import Bind, Claim, decide

PAUSES = (0.1, 0.3, 1.0)
"""Seconds before each time that kubelet is asked, which answers from memory."""

log = logging.getLogger(__name__)


async def follow(
    changed: asyncio.Event,
    claims: Callable[[], Awaitable[Sequence[Claim]]],
    ledger: Ledger,
    *,
    needed: Callable[[], bool],
    count: Callable[[str, str], None],
    clock: Callable[[], float] = time.time,
    pauses: Sequence[float] = PAUSES,
) -> None:
    """Name the pods of grants, for ever, after each change while it is needed. `claims` asks kubelet."""
    while True:
        await changed.wait()
        changed.clear()
        for pause in pauses:
            await asyncio.sleep(pause)
            if not needed():
                break
            asked_at = clock()
            try:
                await asyncio.to_thread(_bind, ledger, await claims(), asked_at, count)
            except AgentError as error:
                log.debug("the pods of new grants are not known yet: %s", error)


def _bind(ledger: Ledger, claims: Sequence[Claim], asked_at: float, count: Callable[[str, str], None]) -> None:
    """Name the pods that hold granted units. What else there is to settle is left to the reconciler."""
    units: dict[PodRef, list[str]] = {}
    for action in decide(
        ledger.grants(), claims, offered=None, attached=(), moved={}, asked_at=asked_at, unclaimed_before=-math.inf
    ):
        if isinstance(action, Bind):
            units.setdefault(action.claim.pod, []).append(action.claim.unit_id)
    for pod, unit_ids in units.items():
        ledger.bind(unit_ids, pod)
        count("grant-bind", "claimed")
