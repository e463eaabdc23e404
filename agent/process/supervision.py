"""Whether the agent lives, for its liveness probe, and work that must not end it.

A volume is bound when its container is created (mount(2)). Whoever deletes kubelet's folder of sockets, to have
kubelet make a new one, leaves the container with the old one: nothing can be made in it any more (ENOENT), and nobody
looks for a socket there. Only another container sees the new one, so this is for the liveness probe to hear.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

AGAIN_SECONDS = 60.0
BEAT_SECONDS = 1.0
STUCK_SECONDS = 20.0
DELETED = "//deleted"
"""How /proc/self/mountinfo ends the root of such a mount (fs/d_path.c)."""

log = logging.getLogger(__name__)


async def supervised(run: Callable[[], Awaitable[None]], what: str, *, again_seconds: float = AGAIN_SECONDS) -> None:
    """Run what no pod needs until cancelled or until `run` returns. Should it fail, say so, and begin anew later."""
    while True:
        try:
            return await run()
        except Exception:
            log.exception("%s failed, and begin anew in %g s", what, again_seconds)
        await asyncio.sleep(again_seconds)


class Heartbeat:
    """Beats on the event loop; any thread may ask whether it still does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at: float | None = None

    async def run(self) -> None:
        """Beat for ever."""
        while True:
            self._at = self._clock()
            await asyncio.sleep(BEAT_SECONDS)

    def stopped(self) -> str | None:
        """Tell for how long the loop has stood still, if that is too long. It has not before the first beat."""
        still = self._clock() - self._at if self._at is not None else 0.0
        return f"the event loop has stood still for {still:.0f} s" if still > STUCK_SECONDS else None


class Volumes:
    """Folders of the host that the agent cannot do without. `lost` may be called on any thread."""

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
