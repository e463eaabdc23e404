"""Settings of Python itself, so that a large or a full node does not hold the agent up: threads, garbage collector.

Threads for work that blocks are all there from the start. An executor starts its threads as they are needed: on a node
that has run out of them (pids.max, kernel.threads-max: a pod that forks too much is enough) the first moment that needs
one more would end the agent, and Allocate would fail a pod for good.

The garbage collector does not walk through all that the agent knows of a large node. A full collection visits every
object there is: 70 to 130 ms on a node with 1,024 VFs, in which nobody gets an answer. What is
there once all parts run lives as long as the agent, or is freed by its count of references, so it need not be visited.
What is made later still is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

MOST = 12
NAME = "worker"
SPARE_THREADS = 4
SETTLED_SECONDS = 5.0
USUAL = gc.get_threshold()
START_THRESHOLD = 200_000
"""So many objects more than at the last collection bring the next one. Imports and a first scan stay below that: what
they make stays, and to look at it again and again would take a tenth of the start."""


def workers_of_loop() -> ThreadPoolExecutor:
    """Make the executor of the event loop. asyncio's own has as many threads, up to 32."""
    return started_workers(min(MOST, (os.cpu_count() or 1) + 4), NAME)


def started_workers(count: int, name: str) -> ThreadPoolExecutor:
    """Make an executor in which `count` threads run already.

    Raises RuntimeError if there are too few to be had.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    here = threading.Barrier(count)
    try:
        for begun in [pool.submit(here.wait) for _ in range(count)]:
            begun.result()
    except RuntimeError:
        here.abort()
        pool.shutdown(wait=False)
        raise
    return pool


class Background:
    """Threads for work that may hang: each has one to itself. A few stay for what comes next.

    To start one costs the caller 0.4 ms, a fifth of a DEL.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._guard = threading.Lock()
        self._spare = 0
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def start(self, work: Callable[[], object]) -> None:
        """Begin work that raises nothing. Raises RuntimeError if no thread can be started; nothing is begun then."""
        with self._guard:
            if self._spare:
                self._spare -= 1
            else:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._work.put(work)

    def _run(self) -> None:
        while True:
            self._work.get()()
            with self._guard:
                if self._spare == SPARE_THREADS:
                    return
                self._spare += 1


def collect_seldom() -> None:
    """Collect seldom until `set_aside`."""
    gc.set_threshold(START_THRESHOLD)


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Keep what is there out of the collector's sight, and let it collect as usual. Enter before serving.

    Without a collection first: pods wait for the end of the start, which leaves next to nothing to be freed.
    """
    gc.freeze()
    gc.set_threshold(*USUAL)
    try:
        yield
    finally:
        gc.unfreeze()


async def set_aside_later(seconds: float = SETTLED_SECONDS) -> None:
    """Wait until the agent has what it needs, and take that out of the collector's sight, too.

    Without a collection first: that would stop every answer.
    """
    await asyncio.sleep(seconds)
    gc.freeze()
