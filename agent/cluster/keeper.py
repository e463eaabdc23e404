"""The one loop that keeps objects at the API server as they should be: write, wait, and after an error wait longer.

`step` is passed the time and returns when it is due again, so a day can pass in a second.
"""

from __future__ import annotations

import math
import random
import time
from abc import ABC, abstractmethod

from agent.errors import AgentError, Unavailable
from agent.process.backoff import Backoff
from agent.state import Latest, first


class Keeper(ABC):
    """Keeps an object, or several, in step with this node."""

    look_seconds = math.inf
    """At most so long between two looks, also while nothing is tried after an error."""

    def __init__(self, retry: Backoff) -> None:
        self._retry = retry
        self.chance = random.SystemRandom().random  # the module's own generator is every thread's
        self._news = Latest(object())
        self._noticed: object = None
        self._failures = 0
        self._not_before = -math.inf

    def changed(self) -> None:
        """Look again. Any thread may call."""
        self._news.set(object())

    async def run(self) -> None:
        """Keep it until cancelled. Errors of ours are waited out; others end the task."""
        while True:
            news = self._news.value
            due = await self.step(time.monotonic())
            wait = min(max(0.0, due - time.monotonic()), self.look_seconds)
            await first(self._news.other_than(news), seconds=wait if wait < math.inf else None)

    async def step(self, now: float) -> float:
        """Do what is due at this moment, and return when something is due next; `inf`: when something has changed."""
        news = self._news.value
        await self._notice(now, is_changed=news is not self._noticed)
        self._noticed = news
        if now < self._not_before:
            return self._not_before
        try:
            return await self._work(now)
        except AgentError as error:
            self._failures += 1
            asked = error.retry_after if isinstance(error, Unavailable) else None
            pause = self._retry.after(self._failures, asked, self.chance())
            self._not_before = now + self._failed(error, pause)
            return self._not_before

    def _hold(self, until: float) -> None:
        """Try nothing before this moment."""
        self._not_before = until

    async def _notice(self, now: float, *, is_changed: bool) -> None:
        """Take in what is wanted now, also while nothing may be tried. May not fail."""
        return

    @abstractmethod
    async def _work(self, now: float) -> float:
        """Write what is due, and return when something is due next. May raise errors of ours."""

    @abstractmethod
    def _failed(self, error: AgentError, pause: float) -> float:
        """Report what went wrong. Returns the pause before the next attempt, which may be shorter than this one."""

    def _went_well(self) -> int:
        """Note that the API server has taken everything. Returns how many attempts had failed before."""
        failures, self._failures = self._failures, 0
        return failures
