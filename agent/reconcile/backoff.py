"""How long to leave alone what has failed."""

from __future__ import annotations

from collections.abc import Callable

FIRST_SECONDS = 2.0
LONGEST_SECONDS = 600.0


class Backoff:
    """Waiting times by name, doubled at each failure. Forgets what succeeds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[str, tuple[int, float]] = {}
        """Name → how often it failed, and when it is due again."""

    def is_due(self, name: str) -> bool:
        """Tell whether it may be tried now."""
        return self._failures.get(name, (0, 0.0))[1] <= self._clock()

    def failed(self, name: str) -> None:
        """Leave it alone for longer than the last time."""
        count = self._failures.get(name, (0, 0.0))[0]
        self._failures[name] = count + 1, self._clock() + min(FIRST_SECONDS * 2 ** min(count, 30), LONGEST_SECONDS)

    def succeeded(self, name: str) -> None:
        """Forget that it ever failed."""
        self._failures.pop(name, None)

    def keep_only(self, names: set[str]) -> None:
        """Forget what does not exist any more."""
        for name in self._failures.keys() - names:
            del self._failures[name]

    def next_due(self) -> float | None:
        """Return in how many seconds something is due; None if nothing has failed."""
        return max(0.0, min(due for _, due in self._failures.values()) - self._clock()) if self._failures else None
