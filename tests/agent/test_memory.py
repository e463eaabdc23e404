from __future__ import annotations

import asyncio
import gc
import weakref

from agent.memory import set_aside, settle


class Ring:
    """Something that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_there_is_out_of_the_collectors_sight_afterwards() -> None:
    before = gc.get_freeze_count()
    with set_aside():
        then = gc.get_freeze_count()
        assert then > before
        kept = [[number] for number in range(1000)]
        asyncio.run(settle(0))
        assert gc.get_freeze_count() >= then + len(kept)
    assert gc.get_freeze_count() == 0


def test_what_the_start_left_behind_is_freed_first() -> None:
    left = weakref.ref(Ring())
    with set_aside():
        assert left() is None
