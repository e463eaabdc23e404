"""Work that no pod needs: an error that nobody expected in it must not end the agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

AGAIN_SECONDS = 60.0

log = logging.getLogger(__name__)


async def lasting(run: Callable[[], Awaitable[None]], what: str, *, again_seconds: float = AGAIN_SECONDS) -> None:
    """Run until cancelled or until `run` returns. Should it fail, say so, and begin anew after a while."""
    while True:
        try:
            return await run()
        except Exception:
            log.exception("%s failed, and begin anew in %g s", what, again_seconds)
        await asyncio.sleep(again_seconds)
