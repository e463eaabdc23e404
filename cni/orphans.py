"""Tells whether IPAM plugins that a killed agent had started may still be at work.

Each agent has a file of its own. A plugin inherits a locked descriptor of it, and the lock lasts for as
long as anybody has the descriptor (flock(2)): the plugin, not the agent, which may be dead by then.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cni import tree

PATTERN = "ipam-*.lock"
OWN = re.compile(r"ipam-[0-9a-f]{8}\.lock")
"""Every such file, and no other program's."""
ORPHAN_SECONDS = 130.0
"""Longer than a plugin may take: what still holds a file then is a daemon that it left behind."""

log = logging.getLogger(__name__)


class Orphans:
    """The plugins of this agent, and of those before it."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Note the files that earlier agents left in the folder. Their number is that of killed agents."""
        self._own = folder / PATTERN.replace("*", secrets.token_hex(4))
        self.mark = self._own.stem
        """How the marks of this agent's plugins begin, see `tree`."""
        self._clock = clock
        self._since = clock()
        try:
            self._earlier = sorted(folder.glob(PATTERN))
        except OSError as error:
            log.warning("plugins of a killed agent go unseen: %s", error)
            self._earlier = []

    @contextmanager
    def plugin(self) -> Iterator[tuple[int, ...]]:
        """Yield the descriptors that a plugin must inherit, while it runs."""
        try:
            descriptor = os.open(self._own, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:  # a full disk; an address is worth more than the mark
            log.warning("%s cannot be made, so a plugin that outlives the agent goes unseen: %s", self._own, error)
            yield ()
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield (descriptor,)
        finally:
            os.close(descriptor)

    def end_earlier(self) -> None:
        """Kill the plugins of earlier agents: nobody bounds any more what they take. Takes a bounded time."""
        for path in self._earlier:
            if not _released(path) and (killed := tree.end_marked(f"{path.stem}:")):
                log.warning("%d processes of IPAM plugins have outlived their agent, and were killed", killed)

    def may_live(self) -> bool:
        """Tell whether a plugin of an earlier agent may be at work. Once none is, none ever will be."""
        if self._earlier and self._clock() - self._since > ORPHAN_SECONDS:
            log.warning("%s is still held, by a daemon presumably; it counts no more", self._earlier[0])
            self._earlier = []
        self._earlier = [path for path in self._earlier if not _released(path)]
        return bool(self._earlier)

    def close(self) -> None:
        """Take the own file away, unless a plugin is at work: the next agent must see that."""
        _released(self._own)


def _released(path: Path) -> bool:
    """Tell whether nobody holds a file any more, and remove it then."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("%s stays: %s", path, error)
    finally:
        os.close(descriptor)
    return True
