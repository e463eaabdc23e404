"""A folder of the host that programs of others read at any moment, changed in whole steps.

Each file appears, changes or goes in one rename, link or unlink, after its content is on the disk.
Temporary files have a name that neither a runtime nor libcni reads (*.conf, *.conflist, *.json). One
installer at a time works in a folder: it holds a lock on the folder itself, which leaves no file behind.

`FolderChanges` tells what others change there, as inotify(7) has it; where that cannot, by looking again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.errors import InstallFailed

TEMPORARY = ".nodefabric-install-"
LOCK_SECONDS = 10.0
LOCK_PAUSE_SECONDS = 0.05
WRITE_BYTES = 1 << 16
IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO, IN_DELETE = 0x8, 0x40, 0x80, 0x200
IN_DELETE_SELF, IN_MOVE_SELF, IN_ONLYDIR = 0x400, 0x800, 0x1000000
WANTED = IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR
REMOVED = IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR
LIMITS = "sysctl fs.inotify.max_user_instances, fs.inotify.max_user_watches"
AGAIN_SECONDS = 5.0
"""Between two looks where the kernel tells nothing."""
SETTLE_SECONDS = 0.1
"""An installer that writes several files makes one change of them."""


Step = Callable[[str], None]
"""Told what comes before each change; a test ends the process there."""


def unobserved(_: str) -> None:
    """Watch no step."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a name in the folder stands for; a link is not followed."""

    content: bytes | None
    """None for what is no regular file."""
    link: str | None
    mode: int
    uid: int
    gid: int
    is_folder: bool
    version: tuple[int, ...]
    """Differs once anybody has written to it or put another in its place."""


class Folder:
    """An open, locked folder. Every method may raise OSError; names are of files in it."""

    def __init__(self, path: Path, fd: int, step: Step) -> None:
        self.path = path
        self._fd = fd
        self._step = step

    def names(self) -> list[str]:
        """List the folder."""
        return sorted(os.listdir(self._fd))

    def read(self, name: str, limit: int) -> Entry | None:
        """Read what is there, or None. Raises OSError (EFBIG) for more than `limit` bytes."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            link = os.readlink(name, dir_fd=self._fd) if stat.S_ISLNK(found.st_mode) else None
            return _entry(found, None, link)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            return _entry(found, None, None)
        with open(fd, "rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
        return _entry(found, content, None)

    def put(
        self,
        name: str,
        content: bytes,
        *,
        mode: int = 0o644,
        like: Entry | None = None,
        instead_of: Entry | None = None,
    ) -> None:
        """Make or replace a file: whole, or not at all.

        Mode and owner are those of `like`, if given. `instead_of` is what it replaces, as it was read: if
        somebody has changed that since, BlockingIOError is raised and it stays.
        """
        temporary = self._temporary()
        self._step(f"create {name}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            with open(fd, "wb", buffering=0) as file:
                for at in range(0, len(content), WRITE_BYTES):
                    self._step(f"write {name} from {at}")
                    _write_all(file.fileno(), content[at : at + WRITE_BYTES])
                self._step(f"give {name} mode and owner")
                os.fchmod(fd, like.mode if like is not None else mode)
                if like is not None and (like.uid, like.gid) != (os.geteuid(), os.getegid()):
                    os.fchown(fd, like.uid, like.gid)
                self._step(f"sync {name}")
                os.fsync(fd)
            self._step(f"rename {name}")
            if instead_of is not None and self._version(name) != instead_of.version:
                raise BlockingIOError(errno.EAGAIN, "was changed by somebody else just now", name)
            os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=self._fd)
            raise
        self._sync()

    def point(self, name: str, target: str) -> None:
        """Make `name` a link to `target`, in place of what was there."""
        temporary = self._temporary()
        self._step(f"create link {name}")
        os.symlink(target, temporary, dir_fd=self._fd)
        self._step(f"rename link {name}")
        os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self._sync()

    def copy(self, name: str, second: str) -> None:
        """Give the same file a second name as well, in place of what had it."""
        temporary = self._temporary()
        self._step(f"link {second}")
        os.link(name, temporary, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)
        self._step(f"rename {second}")
        os.rename(temporary, second, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        # rename(2) does nothing where both names are the same file already.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self._fd)
        self._sync()

    def move(self, name: str, other: str) -> None:
        """Rename in one step, in place of what was there."""
        self._step(f"rename {name}")
        os.rename(name, other, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self._sync()

    def remove(self, name: str) -> None:
        """Take a name away."""
        self._step(f"remove {name}")
        os.unlink(name, dir_fd=self._fd)
        self._sync()

    def remove_leftovers(self) -> None:
        """Remove what an installer that was killed left behind."""
        for name in self.names():
            if name.startswith(TEMPORARY):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._fd)

    def _version(self, name: str) -> tuple[int, ...] | None:
        try:
            return _version(os.stat(name, dir_fd=self._fd, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def _sync(self) -> None:
        self._step("sync the folder")
        os.fsync(self._fd)

    def _temporary(self) -> str:
        return TEMPORARY + secrets.token_hex(8)


@contextmanager
def locked(path: Path, *, remedy: str, step: Step = unobserved, seconds: float = LOCK_SECONDS) -> Iterator[Folder]:
    """Open a folder for one installer at a time. Raises InstallFailed, also for every OSError inside.

    `remedy` says what to do when the folder cannot be used.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(path, fd, seconds)
            folder = Folder(path, fd, step)
            folder.remove_leftovers()
            yield folder
        finally:
            os.close(fd)
    except OSError as error:
        where = path / os.fsdecode(error.filename) if error.filename is not None else path
        raise InstallFailed(f"{where}: {error.strerror}: {remedy}") from error


class FolderChanges:
    """A watch on one folder. It is set again when the folder itself is replaced, at the next wait."""

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


def _lock(path: Path, fd: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise InstallFailed(
                    f"{path}: another installer is at work there: let it end, then try again"
                ) from error
            time.sleep(LOCK_PAUSE_SECONDS)
        else:
            return


def _entry(found: os.stat_result, content: bytes | None, link: str | None) -> Entry:
    mode = found.st_mode
    return Entry(content, link, stat.S_IMODE(mode), found.st_uid, found.st_gid, stat.S_ISDIR(mode), _version(found))


def _version(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _write_all(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


def _tells_of_the_end(events: bytes) -> bool:
    at = 0
    while at < len(events):
        mask = int.from_bytes(events[at + 4 : at + 8], sys.byteorder)
        if mask & (IN_DELETE_SELF | IN_MOVE_SELF):
            return True
        at += 16 + int.from_bytes(events[at + 12 : at + 16], sys.byteorder)
    return False
