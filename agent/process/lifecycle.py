"""A process made of parts: opened in order, run together, closed in reverse."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any

Run = Callable[[], Coroutine[Any, Any, None]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One part of the process. Each of the three may be left out."""

    name: str
    """For people who look at the process's tasks."""
    open: Callable[[], Awaitable[object]] | None = None
    """Makes it ready. The next part waits for that."""
    run: Run | None = None
    """What it does from then on, until it is closed. It may end before, but not by an error: that ends the process."""
    close: Callable[[], Awaitable[object]] | None = None
    """Undoes `open`, also where that failed or was not waited for to the end, and has `run` end if it can."""


def entered(name: str, context: AbstractContextManager[object], run: Run | None = None) -> Part:
    """Make a part that is open while a context manager is entered, on the loop."""
    stack = AsyncExitStack()

    async def enter() -> None:
        stack.enter_context(context)

    return Part(name, enter, run, stack.aclose)


async def run(parts: Iterable[Part], stop: asyncio.Event, leave: Callable[[], Awaitable[object]]) -> None:
    """Open parts in order and run them until `stop` is set; then await `leave`, and close them in reverse.

    A part is asked for when all before it are open, and runs from the moment that it is open itself. Once `stop` is
    set no more are opened. Raises what a part raised, as a group if it was running.
    """
    async with asyncio.TaskGroup() as running, AsyncExitStack() as closing:
        for part in parts:
            opened = _Opened(part)
            closing.push_async_callback(opened.close)
            if part.open is not None:
                await part.open()
            if stop.is_set():
                break
            if part.run is not None:
                opened.task = running.create_task(part.run(), name=part.name)
        await stop.wait()
        await leave()
        log.info("stopping; devices in pods stay where they are")


class _Opened:
    """A part that is open, and what runs of it."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self.task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        try:
            if self._part.close is not None:
                await self._part.close()
        finally:
            if self.task is not None:
                self.task.cancel()
                await asyncio.wait((self.task,))
