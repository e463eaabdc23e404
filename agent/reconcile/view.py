"""What healers go by: the view of one look at kubelet and runtime, and all that lies outside of books and hardware."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent.kubelet.checkpoint import Entry
from agent.kubelet.cri import ContainerRuntime, Sandbox
from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
from agent.model.allocation import Attachment
from agent.model.health import Reason
from agent.offer.offer import Offer
from agent.report.report import Report
from agent.state import Latest
from cni.pod_devices import HeldDevices


class Outside:
    """What healers ask of kubelet, the runtime and the offer, and to whom they report."""

    def __init__(
        self,
        held: HeldDevices,
        offer: Latest[Offer],
        runtime: ContainerRuntime | None,
        replay: Callable[[], int],
        ledger: Ledger,
        report: Report,
    ) -> None:
        """`runtime` is None where it is not asked; `replay` carries out the DELs on disk, and blocks."""
        self._held = held
        self._offer = offer
        self._runtime = runtime
        self._replay = replay
        self._ledger = ledger
        self._report = report
        self.asks_runtime = runtime is not None
        """Whether the container runtime can be asked."""

    async def held_units(self) -> Sequence[HeldUnit]:
        """Ask kubelet what pods hold of ours. On the loop; raises Unavailable."""
        return await self._held.held_units()

    def pods(self) -> Collection[tuple[str, str]]:
        """Name all pods of kubelet's last answer."""
        return self._held.pods

    async def sandboxes(self) -> Sequence[Sandbox]:
        """Ask the container runtime. Raises AgentError."""
        return await self._runtime.sandboxes() if self._runtime is not None else ()

    @property
    def resolves_cdi(self) -> bool | None:
        """Tell whether the container runtime resolves CDI names; None if it did not say."""
        return self._runtime.resolves_cdi if self._runtime is not None else None

    def offer(self) -> Offer:
        """Return the newest offer; before the first one, what it would say."""
        return self._held.offer()

    def devices_of_units(self) -> Mapping[str, tuple[str, ...]] | None:
        """Map the IDs of the offered units to their devices; None before the first offer."""
        offer = self._offer.value
        if not offer.snapshot.generation:
            return None  # the first one may be of nothing
        return {unit.unit_id: unit.devices for offered in offer.units.values() for unit in offered}

    def noted(self) -> Sequence[Entry] | None:
        """List what kubelet's checkpoint counts to containers; None where it cannot be read."""
        return self._held.noted()

    def our_vfs(self) -> Collection[str]:
        """List the VFs that resources offer, or will: before the first offer, too."""
        return self.offer().vfs

    def replay(self) -> int:
        """Carry out the DELs that lie on disk, and tell how many there were. Blocks."""
        count = self._replay()
        self._report.metrics.spooled(count)
        return count

    def count(self, action: str, reason: str) -> None:
        """Count an action, and note it among the recent events."""
        self._report.reconciled(action, reason)

    def misled(self, units: frozenset[tuple[str, str]], what: str | None) -> None:
        """Withhold units whose containers would get another's device, and say which these are."""
        renumbered = self._report.health.renumbered
        renumbered.set(units if units != renumbered.value else renumbered.value)  # equal sets are no news
        self._report.conditions.set("renumbered", what)

    def heal_failed(self, healer: str) -> None:
        """Count a healer that ended early."""
        self._report.metrics.heal_failed(healer)

    def failing(self, what: str | None) -> None:
        """Tell which healers ended early when they last looked."""
        self._report.conditions.set("healing", what)

    def complain(self, what: str | None) -> None:
        """Tell what is wrong with the books, and withhold all units meanwhile."""
        copies = ", ".join(map(str, self._ledger.damaged_copies()))
        self._report.conditions.set(
            "damage",
            f"{self._ledger.path} was damaged, and is replaced; what was damaged is kept as {copies}: see to the disk,"
            " then remove that"
            if copies
            else None,
        )
        self._report.conditions.set("ledger", what)
        self._report.health.unavailable.set(Reason.BOOKS_UNWRITABLE if what is not None else None)

    def now(self) -> float:
        """Return the time as the books have it."""
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


@dataclass(frozen=True, slots=True)
class Task:
    """A healer that remembers nothing."""

    name: str
    work: Callable[[], object]

    def heal(self, view: View) -> None:
        """Do the work."""
        self.work()
