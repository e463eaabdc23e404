"""A folder of the host that programs of others read at any moment, changed in whole steps.

Each file appears, changes or goes in one rename, link or unlink, after its content is on the disk.
Temporary files have a name that neither a runtime nor libcni reads (*.conf, *.conflist, *.json). One
installer at a time works in a folder: it holds a lock on the folder itself, which leaves no file behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.errors import InstallFailed

TEMPORARY = ".nodefabric-install-"
LOCK_SECONDS = 10.0
LOCK_PAUSE_SECONDS = 0.05
LOOK_SECONDS = 0.5
"""Between two looks at whether others have changed something."""


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

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

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
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            with open(fd, "wb", buffering=0):
                while content:
                    content = content[os.write(fd, content) :]
                os.fchmod(fd, like.mode if like is not None else mode)
                if like is not None and (like.uid, like.gid) != (os.geteuid(), os.getegid()):
                    os.fchown(fd, like.uid, like.gid)
                os.fsync(fd)
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
        os.symlink(target, temporary, dir_fd=self._fd)
        os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self._sync()

    def copy(self, name: str, second: str) -> None:
        """Give the same file a second name as well, in place of what had it."""
        temporary = self._temporary()
        os.link(name, temporary, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)
        os.rename(temporary, second, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        # rename(2) does nothing where both names are the same file already.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self._fd)
        self._sync()

    def move(self, name: str, other: str) -> None:
        """Rename in one step, in place of what was there."""
        os.rename(name, other, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self._sync()

    def remove(self, name: str) -> None:
        """Take a name away."""
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
        os.fsync(self._fd)

    def _temporary(self) -> str:
        return TEMPORARY + secrets.token_hex(8)


@contextmanager
def locked(path: Path, *, remedy: str, seconds: float = LOCK_SECONDS) -> Iterator[Folder]:
    """Open a folder for one installer at a time. Raises InstallFailed, also for every OSError inside.

    `remedy` says what to do when the folder cannot be used.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not take_lock(fd, seconds):
                raise InstallFailed(f"{path}: another installer is at work there: let it end, then try again")
            folder = Folder(path, fd)
            folder.remove_leftovers()
            yield folder
        finally:
            os.close(fd)
    except OSError as error:
        where = path / os.fsdecode(error.filename) if error.filename is not None else path
        raise InstallFailed(f"{where}: {error.strerror}: {remedy}") from error


def version_of(path: Path) -> tuple[int, ...]:
    """Return what differs once a file is written to, or a name comes into a folder or leaves it; empty for nothing."""
    try:
        return _version(path.stat())
    except OSError:
        return ()


def take_lock(fd: int, seconds: float) -> bool:
    """Wait so long for the lock on an open file (flock). Returns whether it is had."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_PAUSE_SECONDS)
        else:
            return True


def _entry(found: os.stat_result, content: bytes | None, link: str | None) -> Entry:
    mode = found.st_mode
    return Entry(content, link, stat.S_IMODE(mode), found.st_uid, found.st_gid, stat.S_ISDIR(mode), _version(found))


def _version(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
