"""Folders of the host that were deleted beneath the container, and made anew where it does not see them.

A volume is bound when its container is created (mount(2)). Whoever deletes kubelet's folder of sockets, to have
kubelet make a new one, leaves the container with the old one: nothing can be made in it any more (ENOENT), and nobody
looks for a socket there. Only another container sees the new one, so this is for the liveness probe to hear.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

DELETED = "//deleted"
"""How /proc/self/mountinfo ends the root of such a mount (fs/d_path.c)."""

log = logging.getLogger(__name__)


class Volumes:
    """Folders that the agent cannot do without. `lost` may be called on any thread."""

    def __init__(self, folders: Sequence[Path], mounts: Path = Path("/proc/self/mountinfo")) -> None:
        self._folders = tuple(folders)
        self._mounts = mounts
        self._said = ""

    def lost(self) -> str | None:
        """Name the folders that were deleted beneath this container, if there are any. Said in the log once."""
        gone = [str(folder) for folder in self._folders if _has_no_name(folder) and self._is_deleted(folder)]
        if not gone:
            return None
        text = f"deleted on the host, where this container does not see what has come instead: {', '.join(gone)}"
        if text != self._said:
            log.error("%s; the container must start anew", text)
            self._said = text
        return text

    def _is_deleted(self, folder: Path) -> bool:
        """Ask the kernel: there are file systems that count no links at all."""
        try:
            with self._mounts.open("rb") as mounts:
                fields = [line.split() for line in mounts]
        except OSError:
            return False
        place = os.fsencode(os.path.realpath(folder))
        return any(len(f) > 4 and f[4] == place and f[3].endswith(DELETED.encode()) for f in fields)


def _has_no_name(folder: Path) -> bool:
    try:
        return folder.stat().st_nlink == 0
    except OSError:
        return False
