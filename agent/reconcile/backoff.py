"""How long to leave alone what has failed."""

from __future__ import annotations

from collections.abc import Callable

FIRST_SECONDS = 2.0
LONGEST_SECONDS = 600.0


class Backoff:
    """Waiting times by name, doubled at each failure. Forgets what succeeds.

    The clock may be set back: nothing is left alone for longer than the longest time for that.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[str, tuple[int, float]] = {}
        """Name → how often it failed, and when it is due again."""

    def is_due(self, name: str) -> bool:
        """Tell whether it may be tried now."""
        return self._left(self._failures.get(name, (0, 0.0))[1]) == 0

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
        return min((self._left(due) for _, due in self._failures.values()), default=None)

    def _left(self, due: float) -> float:
        seconds = due - self._clock()
        return seconds if 0 < seconds <= LONGEST_SECONDS else 0.0
