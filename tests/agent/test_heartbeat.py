"""A loop that stands still is told, one that has not begun is not."""

from __future__ import annotations

import asyncio

from agent.heartbeat import STUCK_SECONDS, Heartbeat


def test_a_loop_that_stands_still_is_told_after_a_while() -> None:
    now = [0.0]
    heart = Heartbeat(lambda: now[0])
    now[0] = 1000.0
    assert heart.stopped() is None

    async def beat_once() -> None:
        task = asyncio.create_task(heart.run())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(beat_once())
    now[0] += STUCK_SECONDS
    assert heart.stopped() is None
    now[0] += 5
    assert heart.stopped() == "the event loop has stood still for 25 s"
