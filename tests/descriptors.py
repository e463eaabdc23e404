"""A process that can open no more files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def none_left() -> Iterator[None]:
    """Leave this process no descriptor but those that it has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def left(count: int) -> Iterator[None]:
    """Leave this process so many descriptors besides those that it has open."""
    with ExitStack() as stack:
        highest, taken = max(map(int, os.listdir("/proc/self/fd"))), -1
        while taken <= highest:  # the limit is one of numbers: no lower one may be free
            taken = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, taken)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1 + count, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
