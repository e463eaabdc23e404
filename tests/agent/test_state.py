"""Cells of state: what readers see of many changes, on one loop and from other threads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent.state import Latest

DEADLINE = 30.0


def test_only_another_object_is_news() -> None:
    first, told = ["a"], []
    cell = Latest(first)
    cell.subscribe(lambda: told.append(cell.value))
    cell.set(first)
    assert (cell.version, told) == (0, [])
    cell.set(["b"])
    assert (cell.value, cell.version, told) == (["b"], 1, [["b"]])


async def test_no_follower_misses_the_last_of_many_values_from_another_thread() -> None:
    cell = Latest(0)

    async def follow() -> int:
        value = cell.value
        while value < 1000:
            value = await cell.other_than(value)
            await asyncio.sleep(0)
        return value

    def count() -> None:
        for number in range(1, 1001):
            cell.set(number)

    followers = [asyncio.create_task(follow()) for _ in range(5)]
    await asyncio.sleep(0)
    setting = threading.Thread(target=count)
    setting.start()
    async with asyncio.timeout(DEADLINE):
        assert await asyncio.gather(*followers) == [1000] * 5
    setting.join()


async def test_a_wait_that_is_given_up_leaves_nothing_behind() -> None:
    cell = Latest("a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await cell.other_than("a")
    cell.set("b")
    assert await cell.other_than("a") == "b"


def test_a_loop_that_has_ended_holds_nobody_up() -> None:
    cell = Latest("a")
    ended = asyncio.new_event_loop()
    waiting = ended.create_task(cell.other_than("a"))
    ended.run_until_complete(asyncio.sleep(0))
    ended.close()
    cell.set("b")
    assert cell.value == "b"
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
