"""Which ADDs are in flight, so that a DEL that overtakes one is not lost; and who has called lately.

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
Key = tuple[str, str]
"""Container and interface."""


class InFlight:
    """ADDs by container and interface."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._adds: dict[Key, list[Add]] = {}
        self._callers: dict[Key, float] = {}
        """Who has called → when the last call began, if that was an ADD that has not failed, and else 0.
        Who has called longest ago comes first."""

    def add(self, container_id: str, ifname: str) -> Add:
        """Return what registers an ADD, for the `with` block in which it runs."""
        begun = self._clock()
        self._remember((container_id, ifname), begun)
        return Add(self, (container_id, ifname), begun)

    def overtake(self, container_id: str, ifname: str) -> None:
        """Tell the ADDs in flight that their DEL has come. Call it before looking for rows."""
        with self._guard:
            for add in self._adds.get((container_id, ifname), ()):
                add.overtaken = add.overtaken or not add.closed

    def remember(self, container_id: str, ifname: str) -> None:
        """Note that a call has come, in place of who has called longest ago if there are too many."""
        self._remember((container_id, ifname), 0.0)

    def _remember(self, key: Key, begun: float) -> None:
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
        """Tell whether an ADD that began after a moment (of time.time) has succeeded; None if one is in flight."""
        key = container_id, ifname
        with self._guard:
            if self._callers.get(key, 0.0) <= moment:
                return False
            return None if key in self._adds else True

    def _enter(self, add: Add) -> None:
        with self._guard:
            self._adds.setdefault(add.key, []).append(add)

    def _leave(self, add: Add, *, has_failed: bool) -> None:
        with self._guard:
            if has_failed and self._callers.get(add.key) == add.begun:
                self._callers[add.key] = 0.0
            adds = self._adds[add.key]
            adds.remove(add)
            if not adds:
                del self._adds[add.key]

    def _close(self, add: Add) -> bool:
        with self._guard:
            add.closed = True
            return add.overtaken


class Add:
    """One ADD in flight."""

    __slots__ = ("_in_flight", "begun", "closed", "key", "overtaken")

    def __init__(self, in_flight: InFlight, key: Key, begun: float) -> None:
        self._in_flight = in_flight
        self.key = key
        self.begun = begun
        self.overtaken = False
        """Whether its DEL has come."""
        self.closed = False

    def __enter__(self) -> Add:
        self._in_flight._enter(self)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._in_flight._leave(self, has_failed=error is not None)

    def close(self) -> bool:
        """Take no more word: the rows are written, and a DEL finds them. Tell whether the DEL has come before."""
        return self._in_flight._close(self)
