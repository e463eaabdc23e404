"""What of the ledger bears on the device lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agent.config import Resource
from agent.ledger import Ledger
from agent.model.allocation import Grant
from agent.model.device import Snapshot, is_pci_address
from agent.model.unit_id import UnitId
from agent.offer.assignment import EXCLUSIVE_KINDS, Assignment
from agent.offer.gpu_units import offered_as
from agent.offer.slots import NOTHING_HELD, Holdings

_CLAIM = "claim"


@dataclass(frozen=True, slots=True)
class Reading:
    """What the books say at one moment."""

    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Device → reason."""
    rulers: frozenset[str] = frozenset()
    """Whole adapters that pods have, mode nic: no other pod gets a VF of one."""
    host_names: Mapping[str, str] = field(default_factory=dict)
    """Device in a pod → name of its interface in the host; empty if nobody asks."""
    holders: Mapping[str, str] = field(default_factory=dict)
    """Device in use → the resource that it was handed out under."""
    attached: frozenset[str] = field(default=frozenset())
    """Of these, the ones that are in a pod for certain."""
    forms: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Device that one container may have → the resource that it was handed out under, and as what: see `form_of`."""
    held: Holdings = NOTHING_HELD
    """Slots in use."""
    granted: Mapping[str, int] = field(default_factory=dict)
    """Device → how many units of it kubelet has granted."""
    shares_claimed: Mapping[str, int] = field(default_factory=dict)
    """Adapter → how many of its shares claims have."""
    shares_granted: frozenset[str] = field(default=frozenset())
    """Shares of these adapters that kubelet has granted by their IDs."""
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Rail in use → the NICs that it was granted with."""


def read(books: Ledger, *, with_names: bool, with_slots: bool) -> Reading:
    """Read the books. `with_names` if a selector asks for interface names, `with_slots` if there are any.

    Raises LedgerError.
    """
    attached, grants = books.attachments(), books.grants()
    claimed = [found for claim in books.claims() for found in claim.devices if not found.admin]
    shares: Counter[str] = Counter()
    for found in claimed:
        if not found.exclusive:
            shares[found.device] += found.shares
    ours = {a.device: a.resource_name for a in attached if a.resource_name and is_pci_address(a.device)}
    return Reading(
        quarantined={q.device: q.reason for q in books.quarantines()},
        rulers=frozenset(a.device for a in attached if a.undo.mode == "nic"),
        host_names={a.device: a.undo.netdev for a in attached} if with_names else {},
        holders={device: g.resource_name for g in grants for device in _devices_of(g)}
        | {found.device: found.resource_name for found in claimed}
        | ours,
        attached=frozenset(ours),
        forms={d: (g.resource_name, form) for g in grants if (form := _form(g)) for d in _devices_of(g)}
        | {found.device: (found.resource_name, _CLAIM) for found in claimed if found.exclusive},
        granted=Counter(device for g in grants for device in _devices_of(g)),
        shares_claimed=shares,
        shares_granted=frozenset(g.unit_id for g in grants if g.device in shares and UnitId.parse(g.unit_id).is_share),
        kept={g.unit_id: g.devices for g in grants if UnitId.parse(g.unit_id).is_rail},
        held=Holdings(
            frozenset(g.unit_id for g in grants if UnitId.parse(g.unit_id).is_slot),
            {b.unit_id: b.device for b in books.bindings()},
        )
        if with_slots
        else NOTHING_HELD,
    )


def _devices_of(grant: Grant) -> Iterator[str]:
    """List what a unit brings. A rail is called by its GPU, and its row names its NICs."""
    yield from grant.devices
    unit = UnitId.parse(grant.unit_id)
    if unit.is_rail:
        yield unit.device


def owners_of(assignment: Assignment, resources: Sequence[Resource], snapshot: Snapshot) -> Mapping[str, str]:
    """Tell which resource each device, and each slice of a GPU, goes to that only one container may have."""
    owners = {
        found.candidate.device: name
        for name, taken in assignment.taken.items()
        for found in taken
        if found.kind in EXCLUSIVE_KINDS
    }
    bases = {resource.name: resource for resource in resources if not resource.derived_from}
    cut = [gpu for gpu in snapshot.gpus if gpu.mig_devices and gpu.uuid in owners]
    return owners | {part.uuid: offered_as(bases[owners[gpu.uuid]], part) for gpu in cut for part in gpu.mig_devices}


def strays_of(reading: Reading, owners: Mapping[str, str], resources: Sequence[Resource]) -> Mapping[str, str]:
    """Pick the devices in use that the selectors give to another resource than they were handed out under.

    Or to none: then only those that are in a pod for certain count, as a grant may be of an HCA that many share.
    One that was handed out as something else than its resource offers now is held under a name that no resource has.
    """
    strays = {
        device: resource_name
        for device, resource_name in reading.holders.items()
        if owners.get(device, "" if device in reading.attached else resource_name) != resource_name
    }
    forms = {resource.name: form_of(resource) for resource in resources}
    strays |= {d: f"{name} ({form})" for d, (name, form) in reading.forms.items() if forms.get(name, form) != form}
    return strays


def form_of(resource: Resource) -> str:
    """Tell what a resource hands a device out as: to a claim, by itself, behind a slot, or as one half of a rail."""
    if resource.offer == "dra":
        return _CLAIM
    return "slot" if resource.has_slots else "rail" if resource.kind == "rail" else "itself"


def _form(grant: Grant) -> str:
    """Tell as what a device was handed out; empty if it is shared, or not known yet."""
    unit = UnitId.parse(grant.unit_id)
    if unit.is_slot:
        return "slot" if grant.device else ""
    if unit.is_rail:
        return "rail"
    return "itself" if grant.device and not unit.is_share and unit.device == grant.device else ""
