"""The control groups of one test: a tree of its own in each hierarchy, killed and removed afterwards.

Version 1 has a hierarchy per controller, version 2 one for all, a hybrid machine both.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

KILL_SECONDS = 10.0


def hierarchies(mountinfo: str) -> dict[Path, bool]:
    """Read the mount points of all hierarchies, and whether each is of version 2."""
    found: dict[Path, bool] = {}
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        kind = rest.split(" ", 1)[0]
        if kind in ("cgroup", "cgroup2"):
            found[Path(fields.split()[4])] = kind == "cgroup2"
    return found


class Cgroups:
    """The groups below one name."""

    def __init__(self, name: str) -> None:
        self.name = name
        mounted = hierarchies(Path("/proc/self/mountinfo").read_text())
        self.places = tuple(place / name for place in mounted)
        self._unified = all(mounted.values())

    def missing(self) -> str:
        """Tell what keeps this machine from making control groups; empty if nothing does."""
        if not self.places:
            return "no control groups are mounted at /sys/fs/cgroup"
        try:
            for place in self.places:
                place.mkdir(exist_ok=True)
            if self._unified:
                # A runtime limits each container, so its parents must pass the controllers on.
                (self.places[0].parent / "cgroup.subtree_control").write_text("+pids")
        except OSError as error:
            return f"control groups cannot be made here ({error})"
        finally:
            self.remove()
        return ""

    def kill(self) -> None:
        """Kill all processes in the groups, and wait for their end."""
        deadline = time.monotonic() + KILL_SECONDS
        while (left := set(self._processes())) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def remove(self) -> None:
        """Remove the groups, innermost first."""
        for place in self.places:
            for folder, _, _ in os.walk(place, topdown=False):
                with suppress(OSError):  # still in use: the next test has other names
                    os.rmdir(folder)

    def _processes(self) -> Iterator[int]:
        for place in self.places:
            for folder, _, _ in os.walk(place):
                with suppress(OSError):  # removed meanwhile
                    yield from map(int, (Path(folder) / "cgroup.procs").read_text().split())
