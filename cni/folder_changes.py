"""Changes of a folder, as inotify(7) tells them; where it cannot, by looking again."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import select
import sys
import time
from pathlib import Path

IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO, IN_DELETE = 0x8, 0x40, 0x80, 0x200
IN_DELETE_SELF, IN_MOVE_SELF, IN_ONLYDIR = 0x400, 0x800, 0x1000000
WANTED = IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR
REMOVED = IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR
LIMITS = "sysctl fs.inotify.max_user_instances, fs.inotify.max_user_watches"
AGAIN_SECONDS = 5.0
"""Between two looks where the kernel tells nothing."""
SETTLE_SECONDS = 0.1
"""An installer that writes several files makes one change of them."""


class FolderChanges:
    """A watch on one folder. It is set anew when the folder itself is replaced, at the next wait."""

    def __init__(self, folder: Path, wanted: int = WANTED) -> None:
        """`wanted` are the kinds of changes, as inotify(7) has them."""
        self.problem: str | None = None
        """Why the kernel tells of no changes of a folder that is there."""
        self._folder = folder
        self._wanted = wanted
        self._fd: int | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)

    def wait(self, seconds: float) -> None:
        """Return soon after something changed, and after so many seconds in any case."""
        fd = self.open()
        if fd is None:
            time.sleep(seconds)
            return
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if poll.poll(seconds * 1000):
            time.sleep(SETTLE_SECONDS)
            self._drain(fd)

    async def changed(self, seconds: float | None) -> None:
        """Await what `wait` waits for; without `seconds` however long it takes, unless the kernel tells nothing."""
        fd = self.open()
        if fd is None:
            await asyncio.sleep(seconds if seconds is not None else AGAIN_SECONDS)
            return
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(fd, readable.set)
        try:
            async with asyncio.timeout(seconds):
                await readable.wait()
        except TimeoutError:
            return
        finally:
            loop.remove_reader(fd)
        await asyncio.sleep(SETTLE_SECONDS)
        self._drain(fd)

    def open(self) -> int | None:
        """Begin to watch, unless that is so. The descriptor is readable after a change; None if no change is told."""
        if self._fd is None:
            self._fd = self._watch()
        return self._fd

    def close(self) -> None:
        """End the watch."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _watch(self) -> int | None:
        fd: int = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if fd >= 0 and self._libc.inotify_add_watch(fd, os.fsencode(self._folder), self._wanted) >= 0:
            self.problem = None
            return fd
        number = ctypes.get_errno()
        if fd >= 0:
            os.close(fd)
        is_missing = number in (errno.ENOENT, errno.ENOTDIR)
        self.problem = None if is_missing else f"{self._folder} cannot be watched: {os.strerror(number)} ({LIMITS})"
        return None

    def _drain(self, fd: int) -> None:
        gone = False
        try:
            while events := os.read(fd, 65536):
                gone = gone or _tells_of_the_end(events)
        except BlockingIOError:
            pass
        if gone:
            self.close()


def _tells_of_the_end(events: bytes) -> bool:
    at = 0
    while at < len(events):
        mask = int.from_bytes(events[at + 4 : at + 8], sys.byteorder)
        if mask & (IN_DELETE_SELF | IN_MOVE_SELF):
            return True
        at += 16 + int.from_bytes(events[at + 12 : at + 16], sys.byteorder)
    return False
