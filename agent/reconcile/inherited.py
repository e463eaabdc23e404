"""What is left from before: by the plugins that this agent replaces, and by DELs that came while it was away."""

from __future__ import annotations

from agent.model.device import Snapshot
from agent.reconcile.view import Outside, View
from agent.state import Latest
from cni.attachment import Attachments


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
