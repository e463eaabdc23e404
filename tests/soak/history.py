"""What happened so far, for the report of a violation."""

from __future__ import annotations

MOST_LINES = 30


class History:
    """A list of events in order, each with the names it concerns."""

    def __init__(self) -> None:
        self._events: list[tuple[str, frozenset[str]]] = []

    def note(self, text: str, *concerned: str) -> None:
        """Add an event. One that concerns nobody in particular concerns all."""
        self._events.append((text, frozenset(concerned)))

    def of(self, what: str) -> tuple[str, ...]:
        """Return the last events that concern a device or container, or everybody."""
        own = [text for text, concerned in self._events if not concerned or what in concerned]
        return tuple(own[-MOST_LINES:])

    def all(self) -> tuple[str, ...]:
        """Return all events."""
        return tuple(text for text, _ in self._events)
