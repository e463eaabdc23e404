"""Which ADDs are under way, so that a DEL that overtakes one is not lost; and who has called lately.

A runtime that gives an ADD up sends its DEL at once, and that may come before the ADD has written its row: then
there is nothing to undo, and nobody would ever come again. So the DEL leaves word here, and the ADD undoes itself.

Who has called before is no stranger: a DEL without a row is a repeated one then, or its ADD has failed.

A DEL that lay on disk may be older than an ADD of the same interface, and is not about what that brought.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_CALLERS = 1024
"""Repeated DELs come within minutes, and a node has some hundred pods."""


class Underway:
    """ADDs by container and interface."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._adding: dict[tuple[str, str], list[Mark]] = {}
        self._callers: dict[tuple[str, str], float] = {}
        """Container and interface → when its last call began, if that was an ADD that has not failed, and else 0.
        Who has called longest ago comes first."""

    def add(self, container_id: str, ifname: str) -> Mark:
        """Return what registers an ADD, for the `with` block in which it runs."""
        begun = self._clock()
        self._remember((container_id, ifname), begun)
        return Mark(self._guard, self._adding, self._callers, (container_id, ifname), begun)

    def overtake(self, container_id: str, ifname: str) -> None:
        """Tell the ADDs under way that their DEL has come. Call it before looking for rows."""
        with self._guard:
            for mark in self._adding.get((container_id, ifname), ()):
                mark.overtaken = mark.overtaken or not mark.closed

    def remember(self, container_id: str, ifname: str) -> None:
        """Note that a call has come, in place of who has called longest ago if there are too many."""
        self._remember((container_id, ifname), 0.0)

    def _remember(self, key: tuple[str, str], begun: float) -> None:
        with self._guard:
            self._callers.pop(key, None)
            self._callers[key] = begun
            if len(self._callers) > MAX_CALLERS:
                del self._callers[next(iter(self._callers))]

    def has_called(self, container_id: str, ifname: str) -> bool:
        """Tell whether a call is remembered. An agent that has just started remembers none."""
        with self._guard:
            return (container_id, ifname) in self._callers

    def later_add(self, container_id: str, ifname: str, moment: float) -> bool | None:
        """Tell whether an ADD that began after a moment (of time.time) has succeeded; None if one is under way."""
        key = container_id, ifname
        with self._guard:
            if self._callers.get(key, 0.0) <= moment:
                return False
            return None if key in self._adding else True


class Mark:
    """One ADD under way."""

    __slots__ = ("_adding", "_callers", "_guard", "_key", "begun", "closed", "overtaken")

    def __init__(
        self,
        guard: threading.Lock,
        adding: dict[tuple[str, str], list[Mark]],
        callers: dict[tuple[str, str], float],
        key: tuple[str, str],
        begun: float,
    ) -> None:
        self._guard = guard
        self._adding = adding
        self._callers = callers
        self._key = key
        self.begun = begun
        self.overtaken = False
        """Whether its DEL has come."""
        self.closed = False

    def __enter__(self) -> Mark:
        with self._guard:
            self._adding.setdefault(self._key, []).append(self)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        with self._guard:
            if error is not None and self._callers.get(self._key) == self.begun:
                self._callers[self._key] = 0.0
            marks = self._adding[self._key]
            marks.remove(self)
            if not marks:
                del self._adding[self._key]

    def close(self) -> bool:
        """Take no more word: the rows are written, and a DEL finds them. Tell whether the DEL has come before."""
        with self._guard:
            self.closed = True
            return self.overtaken
