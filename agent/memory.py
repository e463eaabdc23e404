"""Keep the garbage collector from walking through all that the agent knows of a large node.

A full collection visits every object there is: 70 to 130 ms on a node with 1,024 VFs, in which nobody gets an
answer and no lost link is told. What is there once all parts run lives as long as the agent, or is freed by its
count of references, so it need not be visited. What is made later still is.
"""

from __future__ import annotations

import asyncio
import gc

SETTLED_SECONDS = 5.0


async def settle(seconds: float = SETTLED_SECONDS) -> None:
    """Wait until the agent has what it needs, and take that out of the collector's sight."""
    await asyncio.sleep(seconds)
    gc.collect()
    gc.freeze()
