from __future__ import annotations

import asyncio
import gc

from agent.memory import settle


def test_what_is_there_is_out_of_the_collectors_sight_afterwards() -> None:
    before = gc.get_freeze_count()
    try:
        asyncio.run(settle(0))
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
