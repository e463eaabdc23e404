"""Whether the agent lives, for its watchdog and its liveness probe, and work that must not end it.

A volume is bound when its container is created (mount(2)). Whoever deletes kubelet's folder of sockets, to have
kubelet make a new one, leaves the container with the old one: nothing can be made in it any more (ENOENT), and nobody
looks for a socket there. Only another container sees the new one, so this is for the liveness probe to hear.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

AGAIN_SECONDS = 60.0
BEAT_SECONDS = 1.0
STUCK_SECONDS = 15.0
"""kubelet admits no pod of the node while Allocate waits for the loop, so this is short. It is still 15 beats: on a
node without processor time to spare the loop comes late by a second or two, and an end costs a restart. Time in which
the machine is suspended does not count (CLOCK_MONOTONIC). An agent that is itself stopped for longer (SIGSTOP, a
debugger) ends when it goes on."""
DELETED = "//deleted"
"""How /proc/self/mountinfo ends the root of such a mount (fs/d_path.c)."""

log = logging.getLogger(__name__)


async def supervised(
    run: Callable[[], Awaitable[None]],
    what: str,
    tell: Callable[[str | None], None] = lambda _: None,
    *,
    again_seconds: float = AGAIN_SECONDS,
) -> None:
    """Run what no pod needs until cancelled or until `run` returns. Should it fail, say so, and begin again later.

    `tell` gets what is wrong while nothing runs, then None.
    """
    while True:
        try:
            return await run()
        except Exception:
            log.exception("%s failed, and begin again in %g s", what, again_seconds)
        tell(f"failed unexpectedly, and begins again within {again_seconds:g} s: see the log")
        await asyncio.sleep(again_seconds)
        tell(None)


def end_unless_called_again(seconds: float | None) -> None:
    """End the process, with the tracebacks of all threads on stderr, `seconds` after the last call. None: do not.

    The thread that does it needs no interpreter lock, so it also works where C code keeps that. It is a new one at each
    call: on a node without a thread to spare nobody watches until the next call.
    """
    if seconds is None:
        faulthandler.cancel_dump_traceback_later()
        return
    with contextlib.suppress(RuntimeError):
        faulthandler.dump_traceback_later(seconds, exit=True)


def nobody_watches(_seconds: float | None) -> None:
    """Be the watchdog of a process that must not end."""


class Heartbeat:
    """Beats on the event loop; any thread may ask whether it still does, and a watchdog hears each beat."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        watchdog: Callable[[float | None], None] = nobody_watches,
    ) -> None:
        """`watchdog` gets the time within which the next beat must come; None at the end."""
        self._clock = clock
        self._watchdog = watchdog
        self._at: float | None = None

    async def run(self) -> None:
        """Beat for ever."""
        try:
            while True:
                self._at = self._clock()
                self._watchdog(STUCK_SECONDS)
                await asyncio.sleep(BEAT_SECONDS)
        finally:
            self._watchdog(None)

    def stopped(self) -> str | None:
        """Return for how long the loop has stood still, if that is too long. It has not before the first beat."""
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
            log.error("%s; the container must start again", text)
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
