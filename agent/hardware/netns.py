"""Network namespaces: run something inside one, and tell one from another."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from agent.errors import HardwareError
from agent.model.allocation import NetnsId

CLONE_NEWNET = 0x40000000

T = TypeVar("T")


def run_in(netns: int, work: Callable[[], T]) -> T:
    """Run `work` inside the namespace of a descriptor and return its result.

    It runs on a fresh thread that ends afterwards: setns(2) changes the calling thread for good,
    so a pooled thread must never do it, and fork() beside gRPC is not safe.
    Raises HardwareError if the namespace cannot be entered, and whatever `work` raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12
            if libc.setns(netns, CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise HardwareError(f"cannot enter the network namespace: {os.strerror(number)} (errno {number})")
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter, name="netns", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def identity(netns: int) -> NetnsId:
    """Return the identity of an open namespace."""
    status = os.fstat(netns)
    return NetnsId(status.st_dev, status.st_ino)


def is_at(netns: NetnsId, path: str) -> bool:
    """Tell whether this very namespace is bound at the path. A reused path is another namespace."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return NetnsId(status.st_dev, status.st_ino) == netns
