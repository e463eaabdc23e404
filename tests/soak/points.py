"""Fault points: each executed line of the product, and each call out of Python that may change the world.

Nothing here names a place in the product. A point comes before every line of `agent`, `cni` and
`deviceplugin` that is executed on any thread, and after every return from C code of a module that makes
system calls, whoever called it: so the moment between a write and the line after it is there, and so is
the one inside a library. The simulation of the hardware is no product, and its lines are no points.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(f"{ROOT / package}{os.sep}" for package in ("agent", "cni", "deviceplugin"))

KERNEL = str(ROOT / "hack/sim/fabric.py")
"""Does what a kernel does with hardware by itself, which no agent's death interrupts."""
REACHES_OUT = frozenset(
    {"posix", "_io", "socket", "_socket", "sqlite3", "_sqlite3", "_posixsubprocess", "fcntl", "mmap", "signal"}
)
"""Modules of CPython whose C code makes system calls that matter."""
ONLY_LOOKS = frozenset(
    {
        *(
            "stat",
            "lstat",
            "fstat",
            "access",
            "scandir",
            "listdir",
            "readlink",
            "getcwd",
            "fspath",
            "getpid",
            "fsencode",
        ),
        *("read", "readline", "readlines", "readall", "readinto", "recv", "recv_into", "recvmsg", "fileno", "close"),
        *("getsockopt", "settimeout", "gettimeout", "setblocking", "getsockname", "geteuid", "fetchall", "fetchone"),
        *("get_inheritable", "set_inheritable", "get_blocking", "isatty", "tell", "seekable", "readable", "writable"),
        *("__enter__", "__exit__", "waitstatus_to_exitcode", "_path_normpath", "urandom", "get_terminal_size"),
        *("cursor", "cpu_count", "getsignal", "accept", "_accept", "getpeername", "setsockopt", "getdefaulttimeout"),
        *("pipe", "dup", "detach", "socketpair", "pidfd_open", "CMSG_SPACE", "inet_pton", "inet_ntop", "_checkClosed"),
        *(
            "_checkReadable",
            "_checkWritable",
            "fsencode",
            "WIFSTOPPED",
            "waitpid",
            "recvfrom",
            "__init__",
            "set_blocking",
        ),
    }
)
"""What of these changes nothing that outlives the process. Any other name counts as an effect."""


ONLY_ASKS = frozenset({"execute", "send"})
"""What of the rest may have been a mere question, to the books or to the kernel. Then the world looks as before."""


@dataclass(frozen=True, slots=True)
class Point:
    number: int
    where: str
    after_effect: bool
    """Whether it comes right after something that may have changed the world."""
    after_change: bool
    """Whether the world was seen to be another one, or another process was told something."""


class Points:
    """Counts the points as they pass, and kills the process at one of them."""

    def __init__(self, epitaph: int, look: Callable[[], object]) -> None:
        """`epitaph` is a descriptor that takes the place of death. `look` returns what the world looks like."""
        self._epitaph = epitaph
        self._look = look
        self._world: object = None
        self._numbers = itertools.count(1)
        self._at: int | None = None
        self._counting = False
        self._silent: int | None = None
        self.passed: list[Point] = []

    def install(self) -> None:
        """Watch this thread's calls from now on, and all threads that start later."""
        threading.settrace(self._on_call)
        threading.setprofile(self._on_profile)
        sys.settrace(self._on_call)
        sys.setprofile(self._on_profile)

    def arm(self, at: int | None = None) -> None:
        """Count from 1, and die at a number; with None, note all that pass."""
        self._numbers = itertools.count(1)
        self.passed = []
        self._at, self._counting = at, True

    def disarm(self) -> tuple[Point, ...]:
        """Stop counting, and return what has passed."""
        self._counting = False
        return tuple(self.passed)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Let what this thread does pass uncounted: it is no part of the product."""
        self._silent = threading.get_ident()
        try:
            yield
        finally:
            self._silent = None

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        return self._on_line if name.startswith(PRODUCT) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and self._counting:
            self._pass(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}", None)
        return self._on_line

    def _on_profile(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event not in ("c_return", "c_exception") or not self._counting or not _may_change_the_world(argument):
            return
        if threading.get_ident() != self._silent and not _is_done_by_kernel(frame):
            self._pass(
                f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} after {argument.__name__}", argument.__name__
            )

    def _pass(self, where: str, effect: str | None) -> None:
        number = next(self._numbers)
        if self._at is None:
            self.passed.append(Point(number, where, effect is not None, effect is not None and self._changed(effect)))
        elif number == self._at:
            os.write(self._epitaph, where.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def _changed(self, effect: str) -> bool:
        before, self._world = self._world, self._look()
        return before != self._world or effect not in ONLY_ASKS


def _may_change_the_world(function: Any) -> bool:
    if function.__name__ in ONLY_LOOKS:
        return False
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, type(sys)):
        return getattr(function, "__module__", None) in REACHES_OUT
    return any(kind.__module__ in REACHES_OUT for kind in type(owner).__mro__)


def _is_done_by_kernel(frame: FrameType) -> bool:
    at: FrameType | None = frame
    while at is not None:
        if at.f_code.co_filename == KERNEL:
            return True
        at = at.f_back
    return False


def _short(name: str) -> str:
    return name.removeprefix(f"{ROOT}{os.sep}") if name.startswith(str(ROOT)) else os.path.basename(name)


def distinct(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Leave out lines that are executed again with nothing done since: a crash there is the same crash."""
    found = []
    lines: set[str] = set()
    for point in points:
        if point.after_effect:
            lines.clear()
        if point.where not in lines:
            lines.add(point.where)
            found.append(point)
    return tuple(found)
