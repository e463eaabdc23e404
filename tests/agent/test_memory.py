from __future__ import annotations

import asyncio
import gc

from agent.memory import begin, set_aside, settle


def test_what_is_there_is_out_of_the_collectors_sight_afterwards() -> None:
    before = gc.get_freeze_count()
    with set_aside():
        then = gc.get_freeze_count()
        assert then > before
        kept = [[number] for number in range(1000)]
        asyncio.run(settle(0))
        assert gc.get_freeze_count() >= then + len(kept)
    assert gc.get_freeze_count() == 0


def test_the_collector_waits_during_the_start_alone() -> None:
    usual = gc.get_threshold()
    begin()
    assert gc.isenabled()
    assert gc.get_threshold()[0] > 100 * usual[0]
    with set_aside():
        assert gc.get_threshold() == usual
