"""What of the ledger bears on the device lists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agent.config import Resource
from agent.model.allocation import Attachment, Binding, Grant, PodRef, Quarantine
from agent.model.device import Snapshot, is_pci_address
from agent.model.gpu_ids import RAIL_PREFIX
from agent.model.slots import is_slot_id
from deviceplugin.allocation import GrantBook
from deviceplugin.assignment import EXCLUSIVE_KINDS, Assignment
from deviceplugin.gpu_units import offered_as
from deviceplugin.slots import NOTHING_HELD, Holdings


class Books(GrantBook, Protocol):
    """The part of the ledger that device plugins need. All but `subscribe` block."""

    def quarantines(self) -> tuple[Quarantine, ...]:
        """List the withheld devices."""

    def attachments(self) -> tuple[Attachment, ...]:
        """List all devices in pods."""

    def grants(self) -> tuple[Grant, ...]:
        """List all grants."""

    def pod_of(self, unit_id: str) -> PodRef | None:
        """Name the pod that a unit was granted to, as far as that is known. From memory."""

    def bindings(self) -> tuple[Binding, ...]:
        """List the devices of slots."""

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call after each change, on some thread."""


class SlotBook:
    """A book of grants in which a slot that is granted anew is first nobody's: kubelet frees units without a word."""

    def __init__(self, book: GrantBook, granting: Callable[[Collection[str]], object]) -> None:
        """`granting` is told of the slots, and may block briefly."""
        self._book = book
        self._granting = granting

    def grant(self, resource_name: str, units: Mapping[str, str]) -> None:
        """Record that kubelet was given these units (unit ID → device). Blocks; raises LedgerError."""
        slots = [unit for unit in units if is_slot_id(unit)]
        if slots:
            self._granting(slots)
        self._book.grant(resource_name, units)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of the books. Two that are equal make the same lists, but for who holds what."""

    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Device → reason."""
    rulers: frozenset[str] = frozenset()
    """Whole adapters that pods have, mode nic: no other pod gets a VF of one."""
    host_names: Mapping[str, str] = field(default_factory=dict)
    """Device in a pod → name of its interface in the host; empty if nobody asks."""
    holders: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Device in use → the resource that it was handed out under."""
    attached: frozenset[str] = field(default=frozenset(), compare=False)
    """Of these, the ones that are in a pod for certain."""
    forms: Mapping[str, tuple[str, str]] = field(default_factory=dict, compare=False)
    """Device that one container may have → the resource that it was handed out under, and as what: see `form_of`."""
    held: Holdings = NOTHING_HELD
    """Slots in use."""
    kept: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Rail in use → the NIC that it was granted with."""


def read(books: Books, *, with_names: bool, with_slots: bool) -> Reading:
    """Read the books. `with_names` if a selector asks for interface names, `with_slots` if there are any.

    Raises LedgerError.
    """
    attached, grants = books.attachments(), books.grants()
    ours = {a.device: a.resource_name for a in attached if a.resource_name and is_pci_address(a.device)}
    return Reading(
        quarantined={q.device: q.reason for q in books.quarantines()},
        rulers=frozenset(a.device for a in attached if a.undo.mode == "nic"),
        host_names={a.device: a.undo.netdev for a in attached} if with_names else {},
        holders={device: g.resource_name for g in grants for device in _devices_of(g)} | ours,
        attached=frozenset(ours),
        forms={d: (g.resource_name, form) for g in grants if (form := _form(g)) for d in _devices_of(g)},
        kept={g.unit_id: g.device for g in grants if g.unit_id.startswith(RAIL_PREFIX)},
        held=Holdings(
            frozenset(g.unit_id for g in grants if is_slot_id(g.unit_id)),
            {b.unit_id: b.device for b in books.bindings()},
        )
        if with_slots
        else NOTHING_HELD,
    )


def _devices_of(grant: Grant) -> Iterator[str]:
    """List what a unit brings. A rail is called by its GPU, and its row names its NIC."""
    if grant.device:
        yield grant.device
    if grant.unit_id.startswith(RAIL_PREFIX):
        yield grant.unit_id.removeprefix(RAIL_PREFIX)


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
    """Tell what a resource hands a device out as: by itself, behind a slot, or as one half of a rail."""
    return "slot" if resource.binding == "late" else "rail" if resource.kind == "rail" else "itself"


def _form(grant: Grant) -> str:
    """Tell as what a device was handed out; empty if it is shared, or not known yet."""
    if is_slot_id(grant.unit_id):
        return "slot" if grant.device else ""
    if grant.unit_id.startswith(RAIL_PREFIX):
        return "rail"
    return "itself" if grant.device and grant.unit_id.startswith(grant.device) else ""
