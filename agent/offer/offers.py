"""Makes the offer of each moment, with units that stay listed for a while though their devices are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agent.config import Resource, SharedPool
from agent.health_history import HealthHistory
from agent.ledger import Ledger
from agent.model.allocation import Hold
from agent.model.device import Snapshot, is_pci_address
from agent.model.device_health import judge_missing
from agent.model.health import Health, Reason, unhealthy
from agent.model.unit_id import UnitId
from agent.model.vf_identity import Rail
from agent.offer.offer import Offer, Unit
from agent.offer.rails import NamedRails
from agent.offer.selection import EXCLUSIVE_KINDS, Assignment, assign
from agent.offer.units import Inputs, Reading, make_offer, nic_resource, offered_as

_CLAIM = "claim"


def read(books: Ledger, *, with_names: bool) -> Reading:
    """Read the books. `with_names` if a selector asks for interface names. Raises LedgerError."""
    attached = books.attachments()
    holds = (*books.holds(), *(hold for claim in books.claims() for hold in claim.devices if not hold.admin))
    shares: Counter[str] = Counter()
    for hold in holds:
        if hold.is_share:
            shares[hold.device] += hold.shares
    ours = {a.device: a.resource_name for a in attached if a.resource_name and is_pci_address(a.device)}
    return Reading(
        quarantined={q.device: q.reason for q in books.quarantines()},
        whole_adapters=frozenset(a.device for a in attached if a.undo.mode == "nic"),
        host_names={a.device: a.undo.netdev for a in attached} if with_names else {},
        holders={device: hold.resource_name for hold in holds for device in _devices_of(hold)} | ours,
        attached=frozenset(ours),
        forms={d: (hold.resource_name, form) for hold in holds if (form := _form(hold)) for d in _devices_of(hold)},
        slots={hold.key: hold.device for hold in holds if hold.is_slot},
        granted=Counter(device for hold in holds if not hold.claim_uid for device in _devices_of(hold)),
        shares_claimed=shares,
        shares_granted=frozenset(h.key for h in holds if h.device in shares and UnitId.parse(h.key).is_share),
        kept={hold.key: hold.devices for hold in holds if UnitId.parse(hold.key).is_rail},
    )


def _devices_of(hold: Hold) -> Iterator[str]:
    """List what a hold brings. A rail is called by its GPU, and its row names its NICs."""
    yield from hold.devices
    unit = UnitId.parse(hold.key)
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


def misplaced_of(reading: Reading, owners: Mapping[str, str], resources: Sequence[Resource]) -> Mapping[str, str]:
    """Pick the devices in use that the selectors give to another resource than they were handed out under.

    Or to none: then only those that are in a pod for certain count, as a grant may be of an HCA that many share.
    One that was handed out as something else than its resource offers now is held under a name that no resource has.
    """
    misplaced = {
        device: resource_name
        for device, resource_name in reading.holders.items()
        if owners.get(device, "" if device in reading.attached else resource_name) != resource_name
    }
    forms = {resource.name: form_of(resource) for resource in resources}
    misplaced |= {d: f"{name} ({form})" for d, (name, form) in reading.forms.items() if forms.get(name, form) != form}
    return misplaced


def form_of(resource: Resource) -> str:
    """Tell what a resource hands a device out as: to a claim, by itself, behind a slot, or as one half of a rail."""
    if resource.offer == "dra":
        return _CLAIM
    return "slot" if resource.has_slots else "rail" if resource.kind == "rail" else "itself"


def _form(hold: Hold) -> str:
    """Tell as what a device was handed out; empty if it is shared, or not known yet."""
    if hold.claim_uid:
        return _CLAIM if hold.exclusive else ""
    unit = UnitId.parse(hold.key)
    if unit.is_slot:
        return "slot" if hold.device else ""
    if unit.is_rail:
        return "rail"
    return "itself" if hold.device and not unit.is_share and unit.device == hold.device else ""


NEW_SECONDS = 600.0
"""For so long after the first settled numbers of rails, more adapters may appear before the numbers are final."""


class Offers:
    """Makes offers one after the other. Not for two threads at once."""

    def __init__(self, health: HealthHistory, clock: Callable[[], float], rails: tuple[Rail, ...] = ()) -> None:
        """`rails` is how they were numbered last."""
        self._health = health
        self._clock = clock
        self._rails = rails
        self._new_until = 0.0
        """When the numbers of rails become final; it counts only if the agent saw the first settled ones."""
        self._resources: tuple[Resource, ...] = ()
        self._ground: tuple[object, ...] = ()
        """What devices were assigned by last, without regard to who has them."""
        self._assignment = Assignment()
        self._made_of: tuple[object, ...] = ()
        self._made = Offer()
        """What the hardware made of that, which is the same after most changes of the books: each grant is one."""
        self._units: Mapping[str, tuple[Unit, ...]] = {}
        """What was listed last."""
        self._missing = NOBODY_MISSED
        self._held: Mapping[str, str] = {}

    def make(
        self, resources: tuple[Resource, ...], snapshot: Snapshot, books: Reading, named_rails: NamedRails = ()
    ) -> Offer:
        """Make the offer of this moment. `named_rails` are adapters as the configuration numbers them."""
        now, asked = self._clock(), self._health.asked
        if self._resources != resources:
            # What a resource lost because it selects something else now is not missed.
            same = {resource.name for resource in resources if resource in self._resources}
            self._units = {name: units for name, units in self._units.items() if name in same}
            self._resources = resources
        ground = resources, snapshot, books.host_names
        if ground != self._ground:
            self._ground, self._assignment = ground, assign(*ground)
        assignment = self._assignment
        misplaced = misplaced_of(books, owners_of(assignment, resources, snapshot), resources)
        if misplaced:
            assignment = assign(resources, snapshot, books.host_names, misplaced)
        inputs = Inputs(
            *(resources, snapshot, assignment, books),
            misplaced=misplaced,
            named_rails=named_rails,
            known_rails=self._rails,
            is_new_node=self._is_new(now),
        )
        if (inputs, asked) != self._made_of or self._health.seconds_to_look() == 0.0:
            self._made_of, self._made = (inputs, asked), make_offer(replace(inputs, policy=self._health.policy()))
        made = self._made
        self._rails, self._held = made.rails, books.holders
        kept = self._health.settings.value.gone_seconds
        self._missing = miss(
            resources, self._units, made.offered, self._missing, snapshot, books.holders.keys(), now, kept
        )
        self._units = {name: (*units, *self._missing.units.get(name, ())) for name, units in made.offered.items()}
        units = _withheld(self._units, self._health)
        claimable = {name: units[name] for name in made.claimable}
        for_claims = frozenset(unit.device for found in claimable.values() for unit in found)
        return replace(
            made,
            snapshot=snapshot,
            units=MappingProxyType({name: units[name] for name in made.units}),
            claimable=MappingProxyType(claimable),
            granted=MappingProxyType({d: books.granted[d] for d in for_claims & books.granted.keys()}),
            lost=for_claims & self._missing.devices & books.holders.keys(),
        )

    def _is_new(self, now: float) -> bool:
        if not any(rail.is_settled and not rail.is_named for rail in self._rails):
            self._new_until = now + NEW_SECONDS
        return now < self._new_until

    def seconds_to_look(self) -> float | None:
        """Tell in how many seconds another offer is due though nothing happens; None if never."""
        due = self._missing.due(self._held, self._health.settings.value.gone_seconds)
        waits = (self._health.seconds_to_look(), None if due is None else max(0.0, due - self._clock()))
        return min((seconds for seconds in waits if seconds is not None), default=None)


def _withheld(units: Mapping[str, tuple[Unit, ...]], health: HealthHistory) -> Mapping[str, tuple[Unit, ...]]:
    """Make units unhealthy that nobody may be given: a pod that kubelet sends here then would fail for good."""
    if health.unavailable.value is None and not health.renumbered.value:
        return units

    def judged(name: str, unit: Unit) -> Unit:
        misled = Reason.RENUMBERED if (name, unit.unit_id) in health.renumbered.value else None
        reason = health.unavailable.value or misled
        return replace(unit, health=unhealthy(reason)) if reason is not None and unit.health.healthy else unit

    return {name: tuple(judged(name, unit) for unit in found) for name, found in units.items()}


def differs_in_pods_only(old: Snapshot, new: Snapshot) -> bool:
    """Tell whether nothing happened but that interfaces of VFs went into pods or came back.

    No list depends on that, unless a selector asks for names, or one is a port of the host's: a VF's link is that of
    its PF.
    """
    if len(old.devices) != len(new.devices) or replace(old, devices=new.devices, problems=new.problems) != new:
        return False
    return all(
        before is now
        or (
            now.is_vf
            and now.physfn in new.by_address
            and before == replace(now, netdevs=before.netdevs)
            and not any(n.is_enslaved for n in (*before.netdevs, *now.netdevs))
        )
        for before, now in zip(old.devices, new.devices, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Missing:
    """Units whose devices are gone, which stay in the list for a while, with the reason.

    A device that leaves without a word (VFs removed, an adapter off the bus, a driver unbound for which
    its resource selects) is a fault to people and to the pods that held it; kubelet shows it in their
    status only while it is listed. After a while it is no longer capacity of the node, unless a pod
    still holds it. What left because the configuration changed, or went to another resource, is no fault.
    """

    since: Mapping[str, float] = field(default_factory=dict)
    """Unit ID → when it was first missed."""
    units: Mapping[str, tuple[Unit, ...]] = field(default_factory=dict)
    """Resource name → its units, unhealthy."""

    @property
    def devices(self) -> frozenset[str]:
        """The devices that are missed."""
        return frozenset(device for units in self.units.values() for unit in units for device in unit.devices)

    def due(self, held: Collection[str], keep_seconds: float) -> float | None:
        """Tell when the next of them leaves the list: one that nobody holds any more."""
        every = (unit for units in self.units.values() for unit in units)
        waiting = (unit.unit_id for unit in every if not any(device in held for device in unit.devices))
        return min((self.since[unit_id] + keep_seconds for unit_id in waiting), default=None)


NOBODY_MISSED = Missing()


def miss(
    resources: Sequence[Resource],
    before: Mapping[str, Sequence[Unit]],
    now_listed: Mapping[str, Sequence[Unit]],
    missed: Missing,
    snapshot: Snapshot,
    held: Collection[str],
    now: float,
    keep_seconds: float,
) -> Missing:
    """Work out which units of the last offer, or missed earlier, are to be listed on. `held` are devices in use."""
    here = {unit.unit_id for units in now_listed.values() for unit in units}
    since: dict[str, float] = {}
    units: dict[str, tuple[Unit, ...]] = {}
    for resource in resources:
        if isinstance(resource.compat, SharedPool) or resource.has_slots:
            continue
        kept = []
        for unit in before.get(resource.name, ()):
            if unit.unit_id in here or unit.is_slot:
                continue
            began = missed.since.get(unit.unit_id, now)
            is_over = now >= began + keep_seconds or _was_cut_out(unit, snapshot)
            if is_over and not any(device in held for device in unit.devices):
                continue
            health = _judge(resource, unit, snapshot)
            if health is not None:
                kept.append(replace(unit, health=health))
                since[unit.unit_id] = began
        if kept:
            units[resource.name] = tuple(kept)
    return Missing(since, units) if units else NOBODY_MISSED


def _judge(resource: Resource, unit: Unit, snapshot: Snapshot) -> Health | None:
    """Say why a unit is no longer listed; None if that is no fault. A rail is its GPU and its NICs."""
    if resource.kind == "rail" and unit.gpu not in snapshot.gpu_by_uuid:
        return judge_missing(unit.gpu, (), (), snapshot)
    half = nic_resource(resource) if resource.kind == "rail" else resource
    drivers = half.select.drivers if resource.kind != "gpu" else ()
    is_hca = "hca" in (unit.kind, half.kind)
    found = (judge_missing(p.device, p.rdma_devices if is_hca else (), drivers, snapshot) for p in unit.parts)
    return next((health for health in found if health is not None), None)


def _was_cut_out(unit: Unit, snapshot: Snapshot) -> bool:
    """Tell whether it is a slice of a GPU that somebody took away: a GPU that is lost keeps its slices."""
    return unit.kind == "gpu" and unit.device.startswith("MIG-") and bool(snapshot.gpus)
