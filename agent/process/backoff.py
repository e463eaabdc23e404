"""When to try again what failed. Pure, but for what `Retries` remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pause after each failure in a row: `first` seconds, then twice the one before, at most `longest`."""

    first: float
    longest: float
    jitter: float = 0.0
    """By up to this share a pause is shortened, so that nodes do not move in step."""

    def after(self, failures: int, asked: float | None = None, chance: float = 0.0) -> float:
        """Return the pause in seconds; 0 without a failure.

        `asked`: a server's Retry-After, which makes it longer, up to `longest`. `chance` is from 0 to 1.
        """
        if failures <= 0:
            return 0.0
        pause = min(self.longest, self.first * 2.0 ** min(failures - 1, 30))
        return max(pause, min(asked or 0.0, self.longest)) * (1 - self.jitter * chance)


class Retries:
    """What failed, by name, and when each is due again. Forgets what succeeds.

    The clock may be set back: nothing waits for longer than the longest pause for that.
    """

    def __init__(self, backoff: Backoff, clock: Callable[[], float]) -> None:
        self._backoff = backoff
        self._clock = clock
        self._failures: dict[str, tuple[int, float]] = {}
        """Name → how often it failed, and when it is due again."""

    def is_due(self, name: str) -> bool:
        """Return whether it may be tried now."""
        return self._left(self._failures.get(name, (0, 0.0))[1]) == 0

    def failed(self, name: str) -> None:
        """Leave it alone for longer than the last time."""
        count = self._failures.get(name, (0, 0.0))[0] + 1
        self._failures[name] = count, self._clock() + self._backoff.after(count)

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
        return seconds if 0 < seconds <= self._backoff.longest else 0.0
