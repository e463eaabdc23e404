"""Keep the garbage collector from walking through all that the agent knows of a large node.

A full collection visits every object there is: 70 to 130 ms on a node with 1,024 VFs, in which nobody gets an
answer and no lost link is told. What is there once all parts run lives as long as the agent, or is freed by its
count of references, so it need not be visited. What is made later still is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator

SETTLED_SECONDS = 5.0
USUAL = gc.get_threshold()
START_THRESHOLD = 200_000
"""So many objects more than at the last collection bring the next one. Imports and a first scan stay below that: what
they make stays, and to look at it again and again would take a tenth of the start."""


def begin() -> None:
    """Collect seldom until `set_aside`."""
    gc.set_threshold(START_THRESHOLD)


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Keep what is there out of the collector's sight, and let it collect as usual. Enter before serving.

    Without a collection first: pods wait for the end of the start, which leaves next to nothing to be freed.
    """
    gc.freeze()
    gc.set_threshold(*USUAL)
    try:
        yield
    finally:
        gc.unfreeze()


async def settle(seconds: float = SETTLED_SECONDS) -> None:
    """Wait until the agent has what it needs, and take that out of the collector's sight, too.

    Without a collection first: that would stop every answer.
    """
    await asyncio.sleep(seconds)
    gc.freeze()
