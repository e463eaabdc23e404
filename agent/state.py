"""Cells of state: the newest value of something that one part makes and others read.

There is no queue: no reader can take another's value, and one that was late or failed goes on with the newest.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """The newest value of one thing. Its owner sets it; any thread may read it, and wait for a newer one."""

    def __init__(self, value: T) -> None:
        self._guard = threading.Lock()
        self.value = value
        """The newest value. Only `set` replaces it."""
        self._version = 0
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        self._listeners: tuple[Callable[[], object], ...] = ()

    @property
    def version(self) -> int:
        """How often it was replaced. Read before the value, it is never newer than that."""
        return self._version

    def set(self, value: T) -> None:
        """Replace the value, and wake who waits. The same object again is no news. Any thread may call."""
        with self._guard:
            if value is self.value:
                return
            self.value = value
            self._version += 1
            waiting, self._waiting = self._waiting, set()
        try:
            for listener in self._listeners:
                listener()
        finally:
            for loop, waiter in waiting:
                with contextlib.suppress(RuntimeError):  # that loop has ended, and who waited with it
                    loop.call_soon_threadsafe(_wake, waiter)

    async def other_than(self, value: T) -> T:
        """Wait until the newest value is another object than this one, and return it."""
        loop = asyncio.get_running_loop()
        while True:
            waiter = loop.create_future()
            with self._guard:
                if self.value is not value:
                    return self.value
                self._waiting.add((loop, waiter))
            try:
                await waiter
            finally:
                with self._guard:
                    self._waiting.discard((loop, waiter))

    def subscribe(self, listener: Callable[[], object]) -> None:
        """Call at each replacement, on the thread that replaces, before those who wait are woken. It may not raise."""
        self._listeners = (*self._listeners, listener)


async def first(*waits: Coroutine[Any, Any, object], seconds: float | None = None) -> int | None:
    """Wait for the first of several, and give the others up. Tells which it was; None if the seconds passed before."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return next((number for number, task in enumerate(tasks) if task.done()), None)
    finally:
        for task in tasks:
            task.cancel()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
