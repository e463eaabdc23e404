"""Work that goes on after an error that nobody expected."""

from __future__ import annotations

import asyncio
import logging

import pytest

from agent.lasting import lasting


def test_what_fails_begins_anew_and_the_log_tells_why(caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []

    async def run() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise KeyError("0000:3b:00.2")

    with caplog.at_level(logging.ERROR):
        asyncio.run(lasting(run, "recent events", again_seconds=0))
    assert len(runs) == 3
    assert [record.message for record in caplog.records] == ["recent events failed, and begin anew in 0 s"] * 2
    assert "0000:3b:00.2" in caplog.text


def test_who_cancels_it_ends_it() -> None:
    async def run() -> None:
        await asyncio.Event().wait()

    async def cancelled() -> None:
        task = asyncio.create_task(lasting(run, "node events"))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
