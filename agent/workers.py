"""The threads that work which blocks is given to, all of them there from the start.

An executor starts its threads as they are needed. On a node that has run out of threads (pids.max, kernel.threads-max:
a pod that forks too much is enough) the first moment that needs one more would end the agent, and Allocate would fail
a pod for good.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

MOST = 12
NAME = "worker"


def of_loop() -> ThreadPoolExecutor:
    """Make the executor of the event loop. asyncio's own has as many threads, up to 32."""
    return started(min(MOST, (os.cpu_count() or 1) + 4), NAME)


def started(count: int, name: str) -> ThreadPoolExecutor:
    """Make an executor whose threads run already. Raises RuntimeError if there are too few to be had."""
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
