"""Waiting for what must come true. Only a test that fails reaches the deadline, so a busy machine may take its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 100.0


def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Block until something is true. Fails after a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {seconds:g} s"
        time.sleep(0.01)


@contextmanager
def soon(seconds: float, act: Callable[..., object], *values: Any) -> Iterator[None]:
    """Have something done on another thread in a moment; the block ends after that."""
    later = threading.Timer(seconds, act, values)
    later.start()
    try:
        yield
    finally:
        later.join()
