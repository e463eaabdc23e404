"""What the status document and a scrape are made of, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent.model.allocation import Attachment, Claim, Hold, OwedLease, Quarantine
from agent.model.device import Snapshot
from agent.model.vf_identity import RailKey
from agent.offer.offer import Unit


@dataclass(frozen=True, slots=True)
class DriverState:
    """How the driver stands with kubelet and with the cluster."""

    name: str
    problem: str = ""
    """Why kubelet does not know it; empty while it does."""
    slices: int | None = None
    """How many ResourceSlices the API server has as they should be; None as long as nobody knows."""
    dropped: frozenset[str] = frozenset()
    """Features that the cluster leaves out of them: taints, capacity, listAttributes."""
    devices: tuple[tuple[str, str, int], ...] = ()
    """(resource, `healthy` or the reason why not, how many), sorted."""

    @property
    def is_registered(self) -> bool:
        """Return whether kubelet asks the driver for claims."""
        return not self.problem


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a scrape reads."""

    snapshot: Snapshot
    units: Mapping[str, Sequence[Unit]] = field(default_factory=dict)
    """Resource name → its units, also for a resource that has none."""
    holds: tuple[Hold, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    quarantines: tuple[Quarantine, ...] = ()
    scan_milliseconds: float = 0.0
    owed_leases: tuple[OwedLease, ...] = ()
    containers: Mapping[str, str] = field(default_factory=dict)
    """Unit → the container that has it, as far as kubelet has said."""
    conditions: tuple[str, ...] = ()
    """Checks that found something in the way of the agent's work."""
    exporter_names: bool = False
    """The names of sriov-network-metrics-exporter are wanted besides ours."""
    adapters: frozenset[tuple[str, str]] = frozenset()
    """(resource, PCI address of an adapter that it offers, itself or as VFs)."""
    claims: tuple[Claim, ...] = ()
    driver: DriverState | None = None
    """Of claims; None where nothing is offered to them."""
    rails: Mapping[str, RailKey] = field(default_factory=dict)
    """Adapter → the number of its rail, and the plane."""

    @property
    def granted(self) -> Mapping[str, str]:
        """Map the units that somebody holds, by a plugin's grant or a claim, to the device behind each."""
        claimed = {(found.resource_name, found.device) for claim in self.claims for found in claim.devices}
        offered = (unit for units in self.units.values() for unit in units) if claimed else ()
        by_claim = {unit.unit_id: unit.device for unit in offered if (unit.resource_name, unit.device) in claimed}
        return by_claim | {hold.key: hold.device for hold in self.holds}
