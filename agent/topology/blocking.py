"""Blocking calls beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


async def on_own_thread(work: Callable[[], T]) -> T:
    """Run blocking work on a daemon thread of its own.

    Not on the loop's executor: the interpreter joins that one's threads at exit, so an API server
    that does not answer would hold up the end of the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]  # None only where T allows it

    def run() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = work()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, value, failure)
        except RuntimeError:
            log.debug("the loop ended before the API server answered")

    threading.Thread(target=run, name="api", daemon=True).start()
    return await done
