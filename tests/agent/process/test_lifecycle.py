"""Parts are opened in order, run together, and closed in reverse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial

import pytest

from agent.process import lifecycle
from agent.process.lifecycle import Part, entered
from tests.awaiting import until


class Stage:
    """Parts that say what happens to them."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.said: list[str] = []

    async def say(self, what: str) -> None:
        self.said.append(what)
        await asyncio.sleep(0)

    async def last(self, name: str) -> None:
        """Run until cancelled."""
        self.said.append(f"{name} runs")
        try:
            await asyncio.Event().wait()
        finally:
            self.said.append(f"{name} ran")

    def part(self, name: str) -> Part:
        """Make a part that has all three."""
        return Part(
            name, partial(self.say, f"{name} opens"), partial(self.last, name), partial(self.say, f"{name} closes")
        )

    async def leave(self) -> None:
        await self.say("leave")


async def test_parts_are_made_and_opened_in_order_run_together_and_are_closed_in_reverse() -> None:
    stage, closing = Stage(), asyncio.Event()

    async def serve() -> None:
        await closing.wait()
        await stage.say("served to the end")

    async def close() -> None:
        closing.set()
        await until(lambda: "served to the end" in stage.said)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        stage.said.append("entered")
        yield
        stage.said.append("left")

    def listed() -> Iterator[Part]:
        yield stage.part("a")
        stage.said.append("a is open")
        yield entered("context", context())
        yield Part("door", run=serve, close=close)
        yield stage.part("b")

    running = asyncio.create_task(lifecycle.run(listed(), stage.stop, stage.leave))
    await until(lambda: "b runs" in stage.said)
    assert stage.said == ["a opens", "a is open", "entered", "b opens", "a runs", "b runs"]
    stage.said.clear()
    stage.stop.set()
    await running
    assert stage.said == ["leave", "b closes", "b ran", "served to the end", "left", "a closes", "a ran"]


async def test_nothing_more_is_opened_or_run_once_the_end_was_asked_for() -> None:
    stage = Stage()

    async def stopped_meanwhile() -> None:
        await until(lambda: "a runs" in stage.said)
        stage.stop.set()

    listed = [stage.part("a"), Part("b", stopped_meanwhile, partial(stage.last, "b")), stage.part("c")]
    await lifecycle.run(listed, stage.stop, stage.leave)
    assert "b runs" not in stage.said
    assert not [word for word in stage.said if word.startswith("c")]
    assert stage.said[-2:] == ["a closes", "a ran"]


@pytest.mark.parametrize("how", ["open", "run", "made"])
async def test_what_a_part_raises_ends_all_and_those_that_were_open_are_closed(how: str) -> None:
    stage = Stage()

    async def fail() -> None:
        raise RuntimeError("no disk")

    def listed() -> Iterator[Part]:
        yield stage.part("a")
        close = partial(stage.say, "b closes")
        if how == "made":
            raise RuntimeError("no disk")
        yield Part("b", fail, close=close) if how == "open" else Part("b", run=fail, close=close)

    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await lifecycle.run(listed(), stage.stop, stage.leave)
    assert stage.said.index("a closes") > stage.said.index("a opens")
    assert "leave" not in stage.said
    assert ("b closes" in stage.said) == (how != "made")
