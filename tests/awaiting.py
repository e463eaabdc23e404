"""Awaiting what must come true, while the loop runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.waiting import SECONDS


async def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until something is true. Fails after a deadline."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 -- other threads, processes and machines are waited for
            await asyncio.sleep(0.005)
