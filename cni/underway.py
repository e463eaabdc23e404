"""Which ADDs are under way, so that a DEL that overtakes one is not lost.

A runtime that gives an ADD up sends its DEL at once, and that may come before the ADD has written its row: then
there is nothing to undo, and nobody would ever come again. So the DEL leaves word here, and the ADD undoes itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Underway:
    """ADDs by container and interface."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._adding: dict[tuple[str, str], list[Mark]] = {}

    @contextmanager
    def add(self, container_id: str, ifname: str) -> Iterator[Mark]:
        """Register an ADD while it runs."""
        mark, key = Mark(self._guard), (container_id, ifname)
        with self._guard:
            self._adding.setdefault(key, []).append(mark)
        try:
            yield mark
        finally:
            with self._guard:
                self._adding[key].remove(mark)
                if not self._adding[key]:
                    del self._adding[key]

    def overtake(self, container_id: str, ifname: str) -> None:
        """Tell the ADDs under way that their DEL has come. Call it before looking for rows."""
        with self._guard:
            for mark in self._adding.get((container_id, ifname), ()):
                mark.overtaken = mark.overtaken or not mark.closed


class Mark:
    """One ADD under way."""

    def __init__(self, guard: threading.Lock) -> None:
        self._guard = guard
        self.overtaken = False
        """Whether its DEL has come."""
        self.closed = False

    def close(self) -> bool:
        """Take no more word: the rows are written, and a DEL finds them. Tell whether the DEL has come before."""
        with self._guard:
            self.closed = True
            return self.overtaken
