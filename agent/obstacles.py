"""What keeps the agent from doing all its work, for people and probes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

NO_POD_NEEDS = frozenset({"publishing", "config", "overlap", "damage"})
"""Obstacles that people should know of, and that make neither the agent nor the node unready: an API server that is
away, a new configuration that is wrong, a device that two resources select, a damaged ledger that was set aside."""

log = logging.getLogger(__name__)


def _told_nobody(name: str, what: str | None) -> None:
    return None


class Obstacles:
    """What keeps the agent from doing all its work: name → what is wrong. Shown by /readyz."""

    def __init__(self, tell: Callable[[str, str | None], None] = _told_nobody) -> None:
        """`tell` is called with each change: the obstacle's name, and what it is or None."""
        self._tell = tell
        self.found: dict[str, str] = {
            "starting": "the first scan and clean-up are not done",
            "kubelet": "has not been asked yet",
        }

    def set(self, name: str, what: str | None) -> None:
        """Note an obstacle, or that it is gone. Said in the log when it changes."""
        if what is None:
            if self.found.pop(name, None) is not None:
                log.info("no longer in the way: %s", name)
                self._tell(name, None)
        elif self.found.get(name) != what:
            self.found[name] = what
            log.error("%s: %s", name, what)
            self._tell(name, what)

    def first(self, besides: Collection[str] = ()) -> str | None:
        """Return one of them as a sentence, or None. `besides` names some that do not count."""
        return next((f"{name}: {what}" for name, what in list(self.found.items()) if name not in besides), None)
