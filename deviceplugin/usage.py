"""What pods hold, read from kubelet's PodResources after each change, so that a preference need not ask.

kubelet never says that a unit came back, nor what other plugins hand out. PodResources do, but only to who asks,
and nobody may ask while kubelet waits. So they are read when the books have changed, and a moment later: one
reading for all the pods that start together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from agent.clients.kubelet import PodDevices
from agent.errors import Unavailable

SETTLE_SECONDS = 1.0
"""An admission's grants follow each other; the last one's pod is to be in the reading."""
PAUSE_SECONDS = 2.0
LOOK_SECONDS = 60.0
"""What other plugins give out, and take back, changes none of our books."""

Heard = Callable[[Sequence[PodDevices], float], None]
"""Takes the pods, and when they were asked for by the clock."""

log = logging.getLogger(__name__)


async def follow(
    changed: asyncio.Event,
    pods: Callable[[], Awaitable[Sequence[PodDevices]]],
    heard: Heard,
    clock: Callable[[], float],
    *,
    needed: Callable[[], bool],
    settle: float = SETTLE_SECONDS,
    pause: float = PAUSE_SECONDS,
    look: float = LOOK_SECONDS,
) -> None:
    """Read what pods hold now, after each change and now and then, for ever, while it is needed: on a node with GPUs.

    A kubelet that does not answer is asked next time.
    """
    while True:
        changed.clear()
        asked_at = clock()
        try:
            if needed():
                heard(await pods(), asked_at)
        except Unavailable as error:
            log.debug("what pods hold stays as it was known: %s", error)
        await asyncio.sleep(pause)
        try:
            async with asyncio.timeout(look):
                await changed.wait()
        except TimeoutError:
            continue
        await asyncio.sleep(settle)
