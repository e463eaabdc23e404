"""Rows of the ledger: devices in pods, and on their way there or back."""

from __future__ import annotations

import logging
from collections.abc import Callable

from agent.errors import AgentError
from agent.ledger import Ledger
from agent.model.device import Snapshot
from agent.reconcile.view import Outside, View
from agent.state import Latest
from cni.attachment import Attachments

FIRST_SECONDS = 2.0
LONGEST_SECONDS = 600.0
SEARCH = "search"
"""Name of the search for VFs among what is left alone for a while. No device is called so."""

log = logging.getLogger(__name__)


class Rows:
    """Heals what a row's device and namespace show to be over. What fails is left alone for longer and longer."""

    name = "rows"

    def __init__(self, ledger: Ledger, attachments: Attachments, outside: Outside) -> None:
        self.backoff = Backoff(outside.now)
        self._ledger = ledger
        self._attachments = attachments
        self._outside = outside

    def heal(self, view: View) -> None:
        """Look at every row that is due."""
        rows = self._ledger.attachments()
        self.backoff.keep_only({row.device for row in rows} | {SEARCH})
        for row in rows:
            if self.backoff.is_due(row.device):
                self.heal_one(row.device, view)

    def heal_one(self, device: str, view: View) -> None:
        """Look at a device's row."""
        try:
            reason = self._attachments.heal(device, view.pod_known)
        except (AgentError, OSError) as error:
            log.error("%s cannot be healed yet: %s", device, error)
            self._outside.count("detach-failed", error.reason if isinstance(error, AgentError) else "OSError")
            self.backoff.failed(device)
        else:
            self.backoff.succeeded(device)
            if reason is not None:
                self._outside.count("detach", reason)


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


class ReplacedPlugins:
    """Takes over what the replaced plugins left, before anybody's DEL looks for it."""

    name = "replaced plugins"

    def __init__(self, attachments: Attachments, snapshot: Latest[Snapshot], outside: Outside) -> None:
        self._attachments = attachments
        self._snapshot = snapshot
        self._outside = outside

    def heal(self, view: View) -> None:
        """Take over once, at the start."""
        if self._snapshot.value.boot_id and self._attachments.adopter.is_due:
            self.adopt()

    def adopt(self) -> None:
        """Take over what there is."""
        for _ in self._attachments.adopter.adopt().devices:
            self._outside.count("adopt", "replaced-plugin")


class SpooledDels:
    """Carries out the DELs that lie on disk."""

    name = "DELs on disk"

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def heal(self, view: View) -> None:
        """Carry them out."""
        self.carry_out()

    def carry_out(self) -> None:
        """Carry them out. Blocks."""
        for _ in range(self._outside.replay()):
            self._outside.count("replay", "spooled-del")
