"""Which ADDs are under way, so that a DEL that overtakes one is not lost; and who has called lately.

A runtime that gives an ADD up sends its DEL at once, and that may come before the ADD has written its row: then
there is nothing to undo, and nobody would ever come again. So the DEL leaves word here, and the ADD undoes itself.

Who has called before is no stranger: a DEL without a row is a repeated one then, or its ADD has failed.
"""

from __future__ import annotations

import threading

MAX_CALLERS = 1024
"""Repeated DELs come within minutes, and a node has some hundred pods."""


class Underway:
    """ADDs by container and interface."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._adding: dict[tuple[str, str], list[Mark]] = {}
        self._callers: dict[tuple[str, str], None] = {}
        """Container and interface, who has called longest ago first."""

    def add(self, container_id: str, ifname: str) -> Mark:
        """Return what registers an ADD, for the `with` block in which it runs."""
        self.remember(container_id, ifname)
        return Mark(self._guard, self._adding, (container_id, ifname))

    def overtake(self, container_id: str, ifname: str) -> None:
        """Tell the ADDs under way that their DEL has come. Call it before looking for rows."""
        with self._guard:
            for mark in self._adding.get((container_id, ifname), ()):
                mark.overtaken = mark.overtaken or not mark.closed

    def remember(self, container_id: str, ifname: str) -> None:
        """Note that a call has come, in place of who has called longest ago if there are too many."""
        with self._guard:
            self._callers.pop((container_id, ifname), None)
            self._callers[container_id, ifname] = None
            if len(self._callers) > MAX_CALLERS:
                del self._callers[next(iter(self._callers))]

    def has_called(self, container_id: str, ifname: str) -> bool:
        """Tell whether a call is remembered. An agent that has just started remembers none."""
        with self._guard:
            return (container_id, ifname) in self._callers


class Mark:
    """One ADD under way."""

    __slots__ = ("_adding", "_guard", "_key", "closed", "overtaken")

    def __init__(self, guard: threading.Lock, adding: dict[tuple[str, str], list[Mark]], key: tuple[str, str]) -> None:
        self._guard = guard
        self._adding = adding
        self._key = key
        self.overtaken = False
        """Whether its DEL has come."""
        self.closed = False

    def __enter__(self) -> Mark:
        with self._guard:
            self._adding.setdefault(self._key, []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with self._guard:
            marks = self._adding[self._key]
            marks.remove(self)
            if not marks:
                del self._adding[self._key]

    def close(self) -> bool:
        """Take no more word: the rows are written, and a DEL finds them. Tell whether the DEL has come before."""
        with self._guard:
            self.closed = True
            return self.overtaken
