"""What the status document and a scrape are made of, as frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agent.model.allocation import Attachment, Claim, ClaimState, Hold, OwedLease, PodRef, Quarantine, how_held
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
class Held:
    """A device that pods have: by a unit, a slot, a claim, or because CNI alone brought it into their network."""

    device: str
    """Empty for a slot that is not bound; `<adapter>/<container>/<interface>` for an interface made on an adapter."""
    resource_name: str
    how: str
    """Granted to, claimed by, or attached to: in the user's words."""
    state: str
    """That of its move, else that of the claim, else `granted`."""
    since: float
    pods: tuple[PodRef, ...]
    """Empty as long as nobody knows."""
    hold: Hold | None = None
    """None if CNI alone brought it in."""
    container: str = ""
    row: Attachment | None = None
    """None where it is in no pod's network."""


NO_CONTAINERS: Mapping[str, str] = MappingProxyType({})


def held(
    holds: Iterable[Hold],
    claims: Iterable[Claim],
    attachments: Iterable[Attachment],
    containers: Mapping[str, str] = NO_CONTAINERS,
) -> tuple[Held, ...]:
    """List who holds what: what is in pods' networks, then the rest. `containers` names those that have units."""
    ways = [*((hold, None) for hold in holds), *((hold, claim) for claim in claims for hold in claim.devices)]
    given = [_given(device, *way, containers) for way in ways for device in way[0].devices or ("",)]
    of_device: dict[str, list[Held]] = {}
    for each in given:
        of_device.setdefault(each.device, []).append(each)
    moved, is_moved = [], set[int]()
    for row in attachments:
        mates = [each for each in of_device.get(row.parent, ()) if each.hold and _has_brought(each.hold, row)]
        mine = min(mates, key=lambda each: id(each) in is_moved, default=None)  # of several shares each has one
        moved.append(_moved(row, mine))
        is_moved.add(id(mine))
    return (*moved, *(each for each in given if id(each) not in is_moved))


def _given(device: str, hold: Hold, claim: Claim | None, containers: Mapping[str, str]) -> Held:
    how = how_held(hold, claim, container := containers.get(hold.key, ""))
    if claim is not None:
        return Held(device, hold.resource_name, how, claim.state.value, claim.since, claim.pods, hold)
    pods = (hold.pod,) if hold.pod is not None else ()
    return Held(device, hold.resource_name, how, "granted", hold.since, pods, hold, container)


def _has_brought(hold: Hold, row: Attachment) -> bool:
    if hold.claim_uid or row.claim_uid:
        return hold.claim_uid == row.claim_uid and not hold.admin
    return row.owner.pod.is_same(hold.pod) if hold.pod is not None else row.device in hold.devices


def _moved(row: Attachment, given: Held | None) -> Held:
    pods, state = (row.owner.pod,) if row.owner.pod.name else (), row.state.value
    if given is None or given.hold is None:
        how = f"attached to {row.owner.pod if pods else 'a pod that nobody knows'}"
        return Held(row.device, row.resource_name, how, state, row.since, pods, row=row)
    if given.state == ClaimState.UNPREPARING:
        state = given.state
    made = replace(given, device=row.device, state=state, since=row.since, row=row)
    if made.pods or not pods:
        return made
    return replace(made, pods=pods, how=how_held(replace(given.hold, pod=row.owner.pod), None, given.container))


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

    @property
    def held(self) -> tuple[Held, ...]:
        """List who holds what; of a rail its GPU, too."""
        found = held(self.holds, self.claims, self.attachments, self.containers)
        gpus = {unit.unit_id: unit.gpu for units in self.units.values() for unit in units if unit.gpu}
        of_rails = (_given(gpus[hold.key], hold, None, self.containers) for hold in self.holds if hold.key in gpus)
        return (*found, *of_rails)
