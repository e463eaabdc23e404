"""Wakes a thread a moment later: a timer of the kernel, timerfd_create(2), which Python has from 3.13 on only.

Whoever sets it is not held up. A queue or a condition wakes the other thread at once, and that takes the interpreter's
lock from the one that goes on.
"""

from __future__ import annotations

import ctypes
import os
import time

TFD_CLOEXEC = os.O_CLOEXEC
_SECOND = 1_000_000_000

# PyDLL: the calls do not block, and CDLL would offer the interpreter's lock to others around each.
_libc = ctypes.PyDLL(None, use_errno=True)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("first", _Time))


class Alarm:
    """Goes off once after it was set. One thread waits; any may set it."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is how long after `set` it goes off. Raises OSError."""
        whole, part = divmod(max(1, int(seconds * _SECOND)), _SECOND)
        # Made once: a pod may be waiting for whoever sets it.
        self._setting = ctypes.byref(_Setting(_Time(0, 0), _Time(whole, part)))
        self._file: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, TFD_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), f"timerfd_create: {os.strerror(ctypes.get_errno())}")
        self._timer = ctypes.c_int(self._file)

    def set(self) -> bool:
        """Let it go off after its time from now, whatever was set before. False if the kernel refuses."""
        return bool(_libc.timerfd_settime(self._timer, 0, self._setting, None) == 0)

    def wait(self) -> None:
        """Return when it has gone off since the last wait."""
        os.read(self._file, 8)

    def close(self) -> None:
        """Close it, with nobody waiting."""
        os.close(self._file)
