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


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Free what the start has left behind, and keep the rest out of the collector's sight. Enter before serving."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def settle(seconds: float = SETTLED_SECONDS) -> None:
    """Wait until the agent has what it needs, and take that out of the collector's sight, too.

    Without a collection first: it would find next to nothing after `set_aside`, and would stop every answer.
    """
    await asyncio.sleep(seconds)
    gc.freeze()
