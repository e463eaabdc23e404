"""Network namespaces: run something inside one, and tell one from another."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from agent.errors import HardwareError
from agent.model.allocation import NetnsId

CLONE_NEWNET = 0x40000000
MAX_LOOKED_AT = 100_000
"""So many processes and bound namespaces are looked at to find a lost one."""

FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO in include/linux/proc_ns.h"""

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
    try:
        thread.start()
    except RuntimeError as error:
        raise HardwareError(f"cannot enter the network namespace: {error}") from error
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def identity(netns: int) -> NetnsId:
    """Return the identity of an open namespace."""
    status = os.fstat(netns)
    return NetnsId(status.st_dev, status.st_ino)


def own() -> NetnsId:
    """Return the identity of the namespace that this process began in."""
    status = os.stat("/proc/self/ns/net")
    return NetnsId(status.st_dev, status.st_ino)


def living(folders: Iterable[Path], processes: Path = Path("/proc"), limit: int = MAX_LOOKED_AT) -> dict[NetnsId, Path]:
    """Find all network namespaces that can be seen: those bound into folders, then those of processes.

    The own one is left out. A namespace that only a descriptor or a hidden process holds is not found.
    """
    mine = own()
    found: dict[NetnsId, Path] = {}
    bound = (path for folder in folders for path in _entries(folder))
    running = (path / "ns/net" for path in _entries(processes) if path.name.isdecimal())
    for path in itertools.islice(itertools.chain(bound, running), limit):
        try:
            status = path.stat()
        except OSError:  # gone just now, or not ours to look at
            continue
        netns = NetnsId(status.st_dev, status.st_ino)
        if netns.device == mine.device and netns != mine:  # all namespaces are files of one nsfs
            found.setdefault(netns, path)
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def is_at(netns: NetnsId, path: str) -> bool:
    """Tell whether this very namespace is bound at the path. A reused path is another namespace."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return NetnsId(status.st_dev, status.st_ino) == netns


def is_hidden(netns: NetnsId, path: str) -> bool:
    """Tell whether nobody here can say if a namespace still is at its path.

    Gone, in a folder that is seen, means that the runtime has removed it. A plain file there is one whose mount
    did not reach this process (mount propagation is off). A path in /proc, as of Docker, is in the host's: a container
    has its own, with other processes under these numbers.
    """
    bound = Path(path)
    if bound.parts[:2] == ("/", "proc") and not _sees_all_processes():
        return True
    try:
        return bound.stat().st_dev != netns.device
    except OSError:
        return not bound.parent.exists() and bound.parts[:2] != ("/", "proc")


def _sees_all_processes() -> bool:
    return os.stat("/proc/self/ns/pid").st_ino == FIRST_PID_NAMESPACE
