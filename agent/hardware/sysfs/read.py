"""Small kernel files, read fast and without surprises.

Kernel attributes come and go with their devices, refuse to answer while a link is down, and on
broken hardware fail with EIO. Here is decided which of these is a fact (None) and which is a
`Problem`; the readers of single subsystems build on that. A process that has no descriptor left learns
no fact at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from errno import EINVAL, EMFILE, ENFILE, ENODEV, ENOENT, ENOTDIR, ENXIO, EOPNOTSUPP

from agent.errors import HardwareError
from agent.model.device import Problem

ATTRIBUTE_BYTES = 4096
"""sysfs never shows more than a page (fs/sysfs/file.c, sysfs_kf_seq_show)."""

LONG_READ_BYTES = 1 << 16

_NO_ANSWER = frozenset({ENOENT, ENOTDIR, ENODEV, ENXIO, EINVAL, EOPNOTSUPP})
"""Absent, just removed, or not applicable now: `carrier` of an interface that is down gives
EINVAL, `phys_port_name` without driver support EOPNOTSUPP (net/core/net-sysfs.c)."""

_NO_DESCRIPTOR = frozenset({EMFILE, ENFILE})


def shown(name: str) -> str:
    """Write a name that a folder was listed with as text.

    A pod may call its interface anything, and the interface comes back from it under that name. What is no UTF-8
    cannot be written to books, metrics or sockets.
    """
    return name if name.isascii() else name.encode(errors="surrogateescape").decode(errors="replace")


class Attributes:
    """Kernel files below one root. Paths are absolute as the kernel knows them (`/sys/…`)."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.fspath(root).rstrip("/")
        self._noted: dict[str, str] = {}
        self._blinded = ""
        """The first path that no descriptor was left for, and why."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """List what could not be read so far, by path."""
        return tuple(Problem(shown(path), text) for path, text in sorted(self._noted.items()))

    def check_complete(self) -> None:
        """Raise HardwareError if something was taken for absent only because no descriptor was left to look with."""
        if self._blinded:
            raise HardwareError(self._blinded)

    def note(self, path: str, text: str) -> None:
        """Remember a problem. The first one of a path stays."""
        self._noted.setdefault(path, text)

    def text(self, path: str) -> str | None:
        """Read an attribute; None if it is absent or has no answer now."""
        try:
            content = _content(self._root + path)
        except OSError as error:
            self._failed(path, error)
            return None
        return content.decode("utf-8", "replace").strip()

    def long_text(self, path: str, most: int) -> str | None:
        """Read a file that may be longer than an attribute: so many bytes at most; None if it is absent."""
        try:
            with open(self._root + path, "rb", buffering=LONG_READ_BYTES) as file:
                content = file.read(most)
        except OSError as error:
            self._failed(path, error)
            return None
        return content.decode("utf-8", "replace")

    def whole(self, path: str, default: int, base: int = 10) -> int:
        """Read a whole number, or give the default if there is none."""
        text = self.text(path)
        if not text:
            return default
        try:
            return int(text, base)
        except ValueError:
            self.note(path, f"is not a number: {text[:40]!r}")
            return default

    def wholes(self, folder: str, names: Iterable[str]) -> dict[str, int]:
        """Read many whole numbers of one folder; those that have no answer, or are negative, are left out.

        The way to the folder is walked once: it leads over links deep into the tree of devices, which takes the
        kernel longer than the reading.
        """
        try:
            inside = os.open(self._root + folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._failed(folder, error)
            return {}
        found = {}
        try:
            for name in names:
                try:
                    content = _content(name, inside)
                    value = int(content or b"-1")
                except OSError as error:
                    self._failed(f"{folder}/{name}", error)
                    continue
                except ValueError:
                    self.note(f"{folder}/{name}", f"is not a number: {content[:40]!r}")
                    continue
                if value >= 0:
                    found[name] = value
        finally:
            os.close(inside)
        return found

    def names(self, path: str) -> list[str]:
        """List a folder, sorted; empty if it is absent."""
        try:
            return sorted(os.listdir(self._root + path))
        except OSError as error:
            self._failed(path, error)
            return []

    def folders(self, path: str) -> list[str]:
        """List the folders in a folder, sorted, links left out; empty if it is absent."""
        try:
            with os.scandir(self._root + path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except OSError as error:
            self._failed(path, error)
            return []

    def link(self, path: str) -> str | None:
        """Read where a symbolic link points; None if it is absent."""
        try:
            return os.readlink(self._root + path)
        except OSError as error:
            self._failed(path, error)
            return None

    def exists(self, path: str) -> bool:
        """Tell whether something is there."""
        return os.path.lexists(self._root + path)

    def lacks(self, folder: str, attribute: str) -> None:
        """Note that a device misses an attribute it must have, unless the whole device is gone."""
        if os.path.exists(self._root + folder):  # follows the class link: it may outlive the device a moment
            self.note(f"{folder}/{attribute}", "is missing; the device is left out")

    def _failed(self, path: str, error: OSError) -> None:
        if error.errno in _NO_DESCRIPTOR:
            self._blinded = self._blinded or f"{path} cannot be read: {error.strerror}"
        if error.errno not in _NO_ANSWER:
            self.note(path, f"cannot be read: {error.strerror}")


def _content(path: str, folder: int | None = None) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(descriptor, ATTRIBUTE_BYTES)
    finally:
        os.close(descriptor)
