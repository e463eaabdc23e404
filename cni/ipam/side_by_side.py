"""Work on several groups at once, each on a thread of its own, so that one that takes long delays no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from agent.errors import Unavailable

T = TypeVar("T")


def at_once_at_most(most: int, groups: Sequence[T], work: Callable[[T], int]) -> int:
    """Work on all groups, on so many threads at most, and return the sum. Raises Unavailable if one cannot start."""
    waiting = list(groups)
    done: list[int] = []
    guard = threading.Lock()

    def run() -> None:
        while True:
            with guard:
                if not waiting:
                    return
                group = waiting.pop(0)
            count = work(group)
            with guard:
                done.append(count)

    threads = [threading.Thread(target=run, name="leases", daemon=True) for _ in range(min(most, len(groups)))]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise Unavailable(f"addresses are given back later: {error}") from error
    finally:
        for thread in started:
            thread.join()
    return sum(done)
