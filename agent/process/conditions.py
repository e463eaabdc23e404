"""What keeps the agent from doing all its work, for people and probes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

UNHEARD = frozenset({"kernel-events", "gpu-events", "cdi", "podresources", "runtime"})
"""Conditions that leave the agent slower or less sure: what it hears of late, or cannot ask at the moment."""
NO_POD_NEEDS = (
    frozenset({"publishing", "slices", "dra-features", "config", "overlap", "damage", "renumbered"})
    | {"healing", "standby", "claim-status"}
    | UNHEARD
)
"""Conditions that people should know of, and that make neither the agent nor the node unready: an API server that is
away, a feature that the cluster has not, a new configuration that is wrong, a device that two resources select, a
damaged ledger that was set aside, containers that kubelet would give another's device, a healer that ended early while
the others went on, a claim whose status is refused, another agent that still does the work, and those of UNHEARD."""
NO_ADD_NEEDS = frozenset({"kubelet", "dra", "endpoints", "admin", "reconciler"}) | NO_POD_NEEDS
"""Conditions that keep no pod's network from being made. The runtime calls the whole node's network not ready while
there is another: so a kubelet that has not taken up our resources does not count."""
NO_STANDBY_NEEDS = frozenset({"starting", "kubelet", "endpoints"})
"""Conditions that do not count while another agent has the books: that agent serves kubelet, and has the port."""

log = logging.getLogger(__name__)


def _ignore(name: str, what: str | None) -> None:
    return None


class Conditions:
    """What keeps the agent from doing all its work: name → what is wrong. Shown by /readyz."""

    def __init__(
        self, tell: Callable[[str, str | None], None] = _ignore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`tell` is called with each change: the condition's name, and what it is or None."""
        self._tell = tell
        self._clock = clock
        self.found: dict[str, str] = {
            "starting": "the first scan and clean-up are not done",
            "kubelet": "has not been asked yet",
        }
        self._said = dict(self.found)
        self._expected: dict[str, float] = {}
        """Name → since when it is expected to go by itself."""

    def expect(self, name: str, what: str | None, seconds: float) -> None:
        """Note a condition that goes by itself as a rule, or that it is gone.

        It counts at once, and is an error, and said, when it has lasted so long.
        """
        if what is not None and self._clock() - self._expected.setdefault(name, self._clock()) < seconds:
            self.found[name] = what
        else:
            self.set(name, what)

    def set(self, name: str, what: str | None) -> None:
        """Note a condition, or that it is gone. Said in the log when it changes."""
        if what is None:
            self._expected.pop(name, None)
            self.found.pop(name, None)
            if self._said.pop(name, None) is not None:
                log.info("no longer in the way: %s", name)
                self._tell(name, None)
            return
        self.found[name] = what
        if self._said.get(name) != what:
            self._said[name] = what
            log.error("%s: %s", name, what)
            self._tell(name, what)

    @property
    def stands_by(self) -> bool:
        """Whether another agent has the books."""
        return "standby" in self.found

    def stand_by(self, what: str | None) -> None:
        """Note that another agent has the books, as a sentence, or that this one has them. It is no error."""
        if what is not None:
            self.found["standby"] = what
            log.info("standing by: %s", what)
        elif self.found.pop("standby", None) is not None:
            log.info("taking over: the other agent has ended")

    def known(self) -> dict[str, str]:
        """Return those that make nothing unready: name → what is wrong."""
        return {name: what for name, what in list(self.found.items()) if name in NO_POD_NEEDS}

    def first(self, besides: Collection[str] = ()) -> str | None:
        """Return one of them as a sentence, or None. `besides` names some that do not count."""
        left_out = {*besides, *(NO_STANDBY_NEEDS if self.stands_by else ())}
        return next((f"{name}: {what}" for name, what in list(self.found.items()) if name not in left_out), None)
