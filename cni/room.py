"""Memory for the programs that run at once: they and the agent have one limit, that of the container.

Where it is reached the kernel ends the agent with them (memory.oom.group, which kubelet sets).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cni import program
from cni.places import NoPlace

AGENT_BYTES = 112 << 20
"""What the agent itself takes on a large node (README, Figures), and some."""
EXPECTED_BYTES = 48 << 20
"""Of a program that has just begun: those that talk to the API server take 45 MB."""
YOUNG_SECONDS = 2.0
"""Later it is counted as what it takes, so that two of these that wait for an API server that is away leave room for
another network's: those are as many as hang at once for addresses (`cni.leases`)."""
_UNLIMITED = 1 << 60

Clock = Callable[[], float]


class Room:
    """The memory there is, and who has it."""

    def __init__(self, total: int | None = None, clock: Clock = time.monotonic) -> None:
        """`total` is in bytes; None for no limit."""
        self._total = total
        self._clock = clock
        self._changed = threading.Condition()
        self._counted: dict[Place, int] = {}

    @classmethod
    def of_container(cls, root: Path = Path("/")) -> Room:
        """Make room for what the control group's limit leaves beside the agent: for one program in any case."""
        limit = memory_limit(root)
        return cls(None if limit is None else max(limit - AGENT_BYTES, EXPECTED_BYTES))

    @contextmanager
    def place(self, seconds: float) -> Iterator[Place]:
        """Wait until a program more has room, and keep that for it meanwhile. Raises NoPlace."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, max(0.0, seconds)):
                raise NoPlace("the IPAM plugins at work leave no memory for another: raise the agent's limit")
            place = Place(self)
            self._counted[place] = EXPECTED_BYTES
        try:
            yield place
        finally:
            with self._changed:
                del self._counted[place]
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._total is None or not self._counted or self._sum() + EXPECTED_BYTES <= self._total

    def _sum(self) -> int:
        return sum(self._counted.values())

    def count(self, place: Place, taken: int, age: float) -> bool:
        """Count a program as what it takes. Tell whether it may take that."""
        with self._changed:
            self._counted[place] = max(taken, EXPECTED_BYTES) if age < YOUNG_SECONDS else taken
            self._changed.notify_all()
            fits = self._total is None or taken <= EXPECTED_BYTES or self._sum() <= self._total
            return fits and taken <= program.MAX_MEMORY

    def now(self) -> float:
        """Return the time."""
        return self._clock()


class Place:
    """What is kept for one program."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._began = room.now()

    def allows(self, taken: int) -> bool:
        """Tell whether the program may take so many bytes now."""
        return self._room.count(self, taken, self._room.now() - self._began)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Read the memory limit of this process's control group, in bytes; None for none (cgroups(7)).

    A container sees its own group at the top, where /proc may name it as the host does.
    """
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / "sys/fs/cgroup" / controllers
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            found += [*_lines(top / path.lstrip("/") / name), *_lines(top / name)]
    return min((int(text) for text in found if text.isdecimal() and int(text) < _UNLIMITED), default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
