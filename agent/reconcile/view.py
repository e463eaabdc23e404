"""What healers go by: the view of one look at kubelet and runtime, and all that lies outside of books and hardware."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent.errors import Unavailable
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import HeldUnit
from agent.model.allocation import Attachment, Devices
from agent.offer.offer import Offer


class Outside:
    """What the reconciler asks, and whom it tells. This one knows nothing and tells nobody."""

    asks_runtime = False
    """Whether the container runtime can be asked."""

    async def held_units(self) -> Sequence[HeldUnit]:
        """Ask kubelet what pods hold. Raises AgentError."""
        raise Unavailable("nobody asks kubelet")

    def pods(self) -> Collection[tuple[str, str]]:
        """Name all pods (namespace and name) of kubelet's last answer, whatever they hold."""
        return ()

    async def sandboxes(self) -> Sequence[Sandbox]:
        """Ask the container runtime. Raises AgentError."""
        raise Unavailable("nobody asks the runtime")

    @property
    def resolves_cdi(self) -> bool | None:
        """Tell whether the container runtime resolves CDI names; None if it did not say."""
        return None

    def offer(self) -> Offer:
        """Return the newest offer; before the first one, what it would say."""
        return Offer()

    def devices_of_units(self) -> Mapping[str, Devices] | None:
        """Map the IDs of the offered units to their devices; None before the first offer."""
        return None

    def noted_units(self) -> Collection[str]:
        """Name the units that kubelet's checkpoint counts to containers, init containers among them."""
        return ()

    def our_vfs(self) -> Collection[str]:
        """List the VFs that resources offer."""
        return ()

    def replay(self) -> int:
        """Carry out the DELs that lie on disk, and tell how many there were. Blocks."""
        return 0

    def count(self, action: str, reason: str) -> None:
        """Count an action and why it was taken."""

    def misled(self, units: frozenset[tuple[str, str]], what: str | None) -> None:
        """Withhold units (resource name, ID) whose containers would get another's device; `what` says which these are.

        None when there are none.
        """

    def heal_failed(self, healer: str) -> None:
        """Count a healer that ended early."""

    def failing(self, what: str | None) -> None:
        """Tell which healers ended early when they last looked, and why; None when all got to their end."""

    def complain(self, what: str | None) -> None:
        """Tell what is wrong with the books; None when nothing is."""

    def now(self) -> float:
        """Tell the time as the books have it."""
        return time.time()


@dataclass(frozen=True, slots=True)
class View:
    """What kubelet and the runtime said at one look."""

    asked_at: float = 0.0
    """Seconds since the epoch, before anybody was asked."""
    held_units: Sequence[HeldUnit] | None = None
    """What pods hold; None if kubelet did not answer."""
    pods: Collection[tuple[str, str]] | None = None
    """Namespace and name of kubelet's pods; None if it did not answer."""
    sandboxes: Sequence[Sandbox] | None = None
    """The runtime's; None if it did not answer, or cannot be asked."""
    asks_runtime: bool = False

    @property
    def is_whole(self) -> bool:
        """Tell whether all who can be asked have answered."""
        return self.held_units is not None and not (self.asks_runtime and self.sandboxes is None)

    def pod_known(self, row: Attachment) -> bool | None:
        """Tell whether somebody knows a row's pod. kubelet lists a pod for as long as it counts."""
        if self.pods is not None and (row.owner.pod.namespace, row.owner.pod.name) in self.pods:
            return True
        if self.asks_runtime:
            if self.sandboxes is None:
                return None
            if any(sandbox.sandbox_id == row.owner.container_id for sandbox in self.sandboxes):
                return True
        return None if self.pods is None else False


class Healer(Protocol):
    """Finds one kind of thing that does not fit, and heals it. May block."""

    @property
    def name(self) -> str:
        """What it heals, for the log."""

    def heal(self, view: View) -> None:
        """Look once, and heal what can be healed. Raises if it could not look to the end."""
