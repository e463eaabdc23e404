"""The files of our own CDI specs: put in place as a whole, and found again. Methods block, briefly.

Their folder is on a tmpfs, and a reboot voids what is in it: so a file need be whole (a runtime may read at any
moment), and not on any disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.errors import Unavailable

SPEC_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
MAX_SPEC_BYTES = 4 << 20
SPEC_VERSION = "0.5.0"
"""Old enough for containerd 1.7 and CRI-O 1.24; nothing newer is needed."""
SPEC_SUFFIX = ".json"
OWN_PREFIX = "nodefabric-"


_WRITING = threading.Lock()
"""Held while a file is being put in place: what is half written is not a killed process's then."""


class SpecFiles:
    """Our files of one sort, whose names begin and end alike. A runtime takes `nodefabric-<name>.json` for a spec."""

    def __init__(self, folder: Path, start: str, whose: str, suffix: str = SPEC_SUFFIX, mode: int = 0o644) -> None:
        """`start` is how their names begin, and `whose` says in an error who gets no container without one.

        With another `suffix` they are no specs, and no runtime reads them.
        """
        self.folder = folder
        self._start = start
        self._whose = whose
        self._suffix = suffix
        self._mode = mode

    def path(self, name: str) -> Path:
        """Tell where a spec is."""
        return self.folder / f"{OWN_PREFIX}{name}{self._suffix}"

    def write(self, name: str, text: str) -> None:
        """Write a spec, in place of an earlier one. Raises Unavailable."""
        file = self.path(name)
        fresh = f"{self.folder}/.{file.name}.{os.getpid()}"  # whose suffix no runtime reads
        try:
            with _WRITING:
                with open(self._created(fresh), "wb", buffering=0) as opened:
                    data = text.encode()
                    if opened.write(data) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.rename(fresh, file)
        except OSError as error:
            raise Unavailable(
                f"the CDI spec {file} cannot be written ({error.strerror}): without it the runtime creates no"
                f" container for {self._whose}; mount the folder read-write into the agent (cdiDir)"
            ) from error

    def _created(self, fresh: str) -> int:
        """Create a file, mostly with one system call: kubelet may wait for many."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(fresh, flags, self._mode)
        except FileNotFoundError:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        except FileExistsError:  # of a process that was killed, and had this one's number
            os.unlink(fresh)
        return os.open(fresh, flags, self._mode)

    def remove(self, name: str) -> None:
        """Remove a spec. One that is not there is removed already. Raises Unavailable."""
        try:
            self.path(name).unlink(missing_ok=True)
        except OSError as error:
            raise Unavailable(f"the CDI spec {self.path(name)} cannot be removed: {error.strerror}") from error

    def read(self, name: str) -> bytes:
        """Read a spec. Raises OSError."""
        with self.path(name).open("rb") as stream:
            return stream.read(MAX_SPEC_BYTES)

    def says(self, name: str, text: str) -> bool:
        """Tell whether a spec is there and says this."""
        try:
            return self.read(name) == text.encode()
        except OSError:
            return False

    def stamp(self, name: str) -> tuple[int, int, int] | None:
        """Tell a spec's file from another, and from what it was before somebody wrote it; None if there is none."""
        try:
            found = os.stat(self.path(name))
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def names(self) -> frozenset[str]:
        """List the specs that are there. What a killed process has half written is removed."""
        found = set()
        for path in self._entries():
            if path.name.startswith(f".{OWN_PREFIX}{self._start}"):
                with _WRITING, contextlib.suppress(OSError):  # no runtime reads it
                    path.unlink()
            elif path.name.startswith(f"{OWN_PREFIX}{self._start}") and path.suffix == self._suffix:
                found.add(path.name.removeprefix(OWN_PREFIX).removesuffix(self._suffix))
        return frozenset(found)

    def _entries(self) -> list[Path]:
        try:
            return list(self.folder.iterdir())
        except OSError:
            return []


def text_of(kind: str, devices: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Spell a spec: its kind, and for each device its name and its containerEdits."""
    spelt = [{"name": name, "containerEdits": dict(edits)} for name, edits in devices]
    return json.dumps({"cdiVersion": SPEC_VERSION, "kind": kind, "devices": spelt}, indent=1) + "\n"
