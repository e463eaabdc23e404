"""When a new offer is due, what it says, and what it lists on though it is gone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agent.config import Resource, SharedPool
from agent.config.resources import PLANES
from agent.health import HealthBook
from agent.model.device import Snapshot
from agent.model.health import Health, Reason, unhealthy
from agent.model.nic_health import judge_missing
from agent.model.unit_id import UnitId
from agent.model.vf_identity import Rail
from agent.offer.assignment import NOBODY, Assignment, assign
from agent.offer.books import Reading, owners_of, strays_of
from agent.offer.gpu_units import nic_resource
from agent.offer.offer import Offer, Unit
from agent.offer.rails import NamedRails, planes_in
from agent.offer.selectors import asks_for_names
from agent.offer.slots import NOTHING_HELD, Holdings, list_slots
from agent.offer.units import Inputs, make_offer

NEW_SECONDS = 600.0
"""For so long after the first settled numbers of rails, more adapters may appear before the numbers are final."""


class Offers:
    """Makes offers one after the other. Not for two threads at once."""

    def __init__(self, health: HealthBook, clock: Callable[[], float], rails: tuple[Rail, ...] = ()) -> None:
        """`rails` is how they were numbered last."""
        self._health = health
        self._clock = clock
        self._rails = rails
        self._new_until = 0.0
        """When the numbers of rails become final; it counts only if the agent saw the first settled ones."""
        self._resources: tuple[Resource, ...] = ()
        self._ground: tuple[object, ...] = ()
        """What the last assignment was made of."""
        self._look: tuple[object, ...] = ()
        """What else the last offer was made of."""
        self._natural = Assignment()
        """Which resource has each device by the selectors alone."""
        self._owners: Mapping[str, str] = NOBODY
        self._units: Mapping[str, tuple[Unit, ...]] = {}
        self._missing = NOBODY_MISSED
        self._held: Mapping[str, str] = NOBODY
        self._slots = NOTHING_HELD
        self._claimable: frozenset[str] = frozenset()
        """Devices that claims are for."""
        self._made_of: Snapshot | None = None
        """What the last lists were made of."""
        self._offer: Offer | None = None

    def make(
        self, resources: tuple[Resource, ...], snapshot: Snapshot, books: Reading, named_rails: NamedRails = ()
    ) -> Offer | None:
        """Make an offer, if anything that bears on it has changed since the last one; else None.

        `named_rails` are adapters as the configuration numbers them.
        """
        bearing = self._bearing(resources, snapshot)
        ground = (id(bearing), resources, replace(books, held=NOTHING_HELD), named_rails)
        if ground != self._ground:
            self._natural = assign(resources, snapshot, books.host_names)
            self._owners = owners_of(self._natural, resources, snapshot)
        strays, now = strays_of(books, self._owners, resources), self._clock()
        lost = frozenset(rail for rail in books.kept if UnitId.parse(rail).device not in snapshot.gpu_by_uuid)
        granted = {device: books.granted[device] for device in self._claimable & books.granted.keys()}
        odd, shares = _odd(books.kept, resources, snapshot, self._rails), self._shares_in_claims(books)
        in_pods, other = self._missing.devices & books.holders.keys(), _with_others(books.kept, self._units)
        look = (strays, self._health.turn(), in_pods, (lost, odd, other), granted, shares)
        due = self._missing.due(books.holders, self._health.settings.gone_seconds)
        if (ground, look) == (self._ground, self._look) and (due is None or now < due):
            if books.held == self._slots:
                return self._renewed(snapshot)
            self._slots = books.held
            return self._with_slots(resources, snapshot, books.held)
        if self._resources != resources:
            # What a resource lost because it selects something else now is not missed.
            same = {resource.name for resource in resources if resource in self._resources}
            self._units = {name: units for name, units in self._units.items() if name in same}
            self._resources = resources
        # By the snapshot that is kept: another could come to stand where one stood that nobody keeps.
        self._ground = (id(snapshot), *ground[1:])
        self._held, self._slots = books.holders, books.held
        final = assign(resources, snapshot, books.host_names, strays) if strays else self._natural
        made = make_offer(
            Inputs(
                resources,
                snapshot,
                final,
                quarantined=books.quarantined,
                held=books.held,
                policy=self._health.policy(),
                kept=books.kept,
                strays=strays,
                shares_claimed=books.shares_claimed,
                shares_granted=books.shares_granted,
                rulers=books.rulers,
                named_rails=named_rails,
                known_rails=self._rails,
                is_new_node=self._is_new(now),
            )
        )
        self._rails = made.rails
        kept = self._health.settings.gone_seconds
        self._missing = miss(
            resources, self._units, made.offered, self._missing, snapshot, books.holders.keys(), now, kept
        )
        self._units = {name: (*units, *self._missing.units.get(name, ())) for name, units in made.offered.items()}
        self._made_of = snapshot
        units = _withheld(self._units, self._health)
        claimable = {name: units[name] for name in made.claimable}
        self._claimable = frozenset(unit.device for found in claimable.values() for unit in found)
        granted = {device: books.granted[device] for device in self._claimable & books.granted.keys()}
        in_pods = self._missing.devices & books.holders.keys()
        self._look = (
            *look[:2],
            in_pods,
            (lost, odd, _with_others(books.kept, self._units)),
            granted,
            self._shares_in_claims(books),
        )
        self._offer = replace(
            made,
            units=MappingProxyType({name: units[name] for name in made.units}),
            claimable=MappingProxyType(claimable),
            granted=MappingProxyType(granted),
            lost=self._claimable & in_pods,
            like=made,
        )
        return self._offer

    def _is_new(self, now: float) -> bool:
        if not any(rail.is_settled and not rail.is_named for rail in self._rails):
            self._new_until = now + NEW_SECONDS
        return now < self._new_until

    def _shares_in_claims(self, books: Reading) -> tuple[object, ...]:
        """Tell what of the books marks shares that kubelet is offered; nothing where claims are for them."""
        claimed = {device: count for device, count in books.shares_claimed.items() if device not in self._claimable}
        return (claimed, books.shares_granted) if claimed else ()

    def withdraw(self) -> None:
        """Take note that the last offer was not made known: the next one is due in any case."""
        self._ground = ()

    def _bearing(self, resources: tuple[Resource, ...], snapshot: Snapshot) -> Snapshot:
        """Return the snapshot that the lists were made of, if another makes the same."""
        made_of = self._made_of
        if made_of is None or (not any(map(asks_for_names, resources)) and differs_in_pods_only(made_of, snapshot)):
            return made_of or snapshot
        return snapshot

    def _renewed(self, snapshot: Snapshot) -> Offer | None:
        """Return the last offer with a newer snapshot, which answers to kubelet are made of; None if it has it."""
        if self._offer is None or self._offer.snapshot is snapshot:
            return None
        self._offer = self._offer.with_snapshot(snapshot)
        return self._offer

    def _with_slots(self, resources: tuple[Resource, ...], snapshot: Snapshot, held: Holdings) -> Offer | None:
        """Return the last offer with the slots as they are used now: each pod that comes or goes asks for that."""
        assert self._offer is not None
        late = [resource for resource in resources if resource.has_slots]
        slots = {r.name: list_slots(r, self._offer.pools[r.name], held) for r in late}
        self._units = {**self._units, **slots}
        self._offer = self._offer.with_snapshot(snapshot).with_slots(_withheld(slots, self._health))
        return self._offer

    def seconds_to_look(self) -> float | None:
        """Tell in how many seconds another offer is due though nothing happens; None if never."""
        due = self._missing.due(self._held, self._health.settings.gone_seconds)
        waits = (self._health.seconds_to_look(), None if due is None else max(0.0, due - self._clock()))
        return min((seconds for seconds in waits if seconds is not None), default=None)


def _odd(
    kept: Mapping[str, tuple[str, ...]], resources: Sequence[Resource], snapshot: Snapshot, rails: Sequence[Rail]
) -> Mapping[str, tuple[str, ...]]:
    """Pick the granted rails whose NICs will be others once nobody has them."""
    counts = {resource.nic.count for resource in resources if resource.kind == "rail"}
    planes = planes_in(rails) if PLANES in counts else {}

    def is_odd(nics: tuple[str, ...]) -> bool:
        found = [snapshot.by_address.get(nic) for nic in nics]
        ports = [nic.physfn or nic.address for nic in found if nic is not None]
        wanted = {len(planes.get(port, (port,))) if count == PLANES else count for port in ports for count in counts}
        return len(ports) < len(nics) or wanted != {len(nics)}

    return {rail: nics for rail, nics in kept.items() if is_odd(nics)}


def _with_others(
    kept: Mapping[str, tuple[str, ...]], units: Mapping[str, Sequence[Unit]]
) -> Mapping[str, tuple[str, ...]]:
    """Pick the granted rails that are listed with other NICs, as by a list that was made while they were granted."""
    listed = {unit.unit_id: unit.devices for mine in units.values() for unit in mine if unit.gpu} if kept else {}
    return {rail: nics for rail, nics in kept.items() if listed.get(rail, nics) != nics}


def _withheld(units: Mapping[str, tuple[Unit, ...]], health: HealthBook) -> Mapping[str, tuple[Unit, ...]]:
    """Make units unhealthy that nobody may be given: a pod that kubelet sends here then would fail for good."""
    if health.withheld is None and not health.renumbered:
        return units

    def judged(name: str, unit: Unit) -> Unit:
        misled = Reason.RENUMBERED if (name, unit.unit_id) in health.renumbered else None
        reason = health.withheld or misled
        return replace(unit, health=unhealthy(reason)) if reason is not None and unit.health.healthy else unit

    return {name: tuple(judged(name, unit) for unit in found) for name, found in units.items()}


def differs_in_pods_only(old: Snapshot, new: Snapshot) -> bool:
    """Tell whether nothing happened but that interfaces of VFs went into pods or came back.

    No list depends on that, unless a selector asks for names, or one is a port of the host's: a VF's link is that of
    its PF. On a large node each pod would have all lists made anew twice.
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
