"""What pods hold is offered to no other pod, whatever becomes of configuration and hardware meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import HealthSettings, RailNic, Resource, Select, parse_pf
from agent.health_history import HealthHistory
from agent.ledger import Ledger
from agent.model.allocation import Attachment, Claim, ClaimRef, ClaimState, Hold, Quarantine
from agent.model.device import MigDevice, Snapshot
from agent.model.unit_id import UnitId
from agent.offer.offer import Offer, Unit
from agent.offer.offers import Offers, read
from agent.offer.units import with_profiles
from tests.node import change, claimed, node, without

GONE_SECONDS = 5.0


@dataclass
class InUse(Ledger):
    """The part of the books that lists are made of."""

    granted: dict[str, Hold] = field(default_factory=dict)
    claimed: dict[str, Claim] = field(default_factory=dict)

    def holds(self) -> tuple[Hold, ...]:
        return tuple(self.granted.values())

    def attachments(self) -> tuple[Attachment, ...]:
        return ()

    def claims(self) -> tuple[Claim, ...]:
        return tuple(self.claimed.values())

    def quarantines(self) -> tuple[Quarantine, ...]:
        return ()

    def things(self) -> set[str]:
        """Name all devices in use."""
        claimed = {found.device for claim in self.claimed.values() for found in claim.devices}
        return claimed | {thing for hold in self.granted.values() for thing in held(hold)}


def held(hold: Hold) -> Iterator[str]:
    """Name the devices that a unit brings: VFs, GPUs and slices."""
    yield from hold.devices
    if UnitId.parse(hold.key).is_rail:
        yield UnitId.parse(hold.key).device


def behind(unit: Unit, snapshot: Snapshot) -> set[str]:
    """Name the devices that a unit would bring, a cut GPU's slices among them."""
    found = {*unit.devices, unit.gpu} - {""}
    return found | {part.uuid for gpu in snapshot.gpus if gpu.uuid in found for part in gpu.mig_devices}


def a_configuration(chance: Random) -> tuple[Resource, ...]:
    names = chance.sample(["a/x", "a/y", "a/z"], chance.randint(1, 3))
    return tuple(a_resource(name, chance) for name in names)


def a_resource(name: str, chance: Random) -> Resource:
    pf = chance.choice(["", "rail0", "rail1#0", "rail1"])
    select = Select(pf=(parse_pf(pf),)) if pf else Select()
    kind = chance.choice(["vf", "vf", "rail", "gpu"])
    if kind == "vf":
        binding, offer = chance.choice(["early", "late"]), chance.choice(["devicePlugin", "devicePlugin", "dra"])
        return Resource(name, "vf", select, binding=binding, offer=offer)
    if kind == "rail":
        return Resource(name, "rail", nic=RailNic("vf", select, count=chance.choice([1, 2, 3])))
    return Resource(name, "gpu", mig=chance.choice(["none", "single", "mixed"]))


def a_machine(chance: Random) -> Snapshot:
    snapshot = node(rails=2, vfs=2)
    first, second = snapshot.gpus
    if chance.random() < 0.3:
        parts = tuple(MigDevice(f"MIG-{n}", "1g.10gb", n, 0, 10 << 30) for n in (1, 2))
        second = replace(second, mig_mode=True, mig_devices=parts)
    snapshot = replace(snapshot, gpus=(second,) if chance.random() < 0.2 else (first, second))
    for vf in [device.address for device in snapshot.devices if device.is_vf]:
        what = chance.random()
        snapshot = without(snapshot, vf) if what < 0.1 else snapshot
        snapshot = change(snapshot, vf, driver=None) if what > 0.9 else snapshot
    return snapshot


def use(books: InUse, offer: Offer, chance: Random) -> None:
    """Have kubelet grant a unit, a slot be bound, or a pod end."""
    free = [u for units in offer.units.values() for u in units if u.health.healthy and u.unit_id not in books.granted]
    slots = [hold for hold in books.granted.values() if hold.is_slot and not hold.is_bound]
    ready = [u for units in offer.claimable.values() for u in units if u.health.healthy]
    what = chance.choice(["grant", "grant", "bind", "claim", "end", "unprepare"])
    if what == "claim" and ready and (unit := chance.choice(ready)).device not in books.things():
        found = claimed("r", "n", unit.unit_id, unit.resource_name, unit.kind, unit.device, "")
        books.claimed[unit.device] = Claim(
            ClaimRef(unit.device, "ns", "c"), ClaimState.PREPARED, (replace(found, claim_uid=unit.device),)
        )
    elif what == "unprepare" and books.claimed:
        del books.claimed[chance.choice(list(books.claimed))]
    elif what == "grant" and free:
        unit = chance.choice(free)
        books.granted[unit.unit_id] = Hold(unit.unit_id, unit.resource_name, () if unit.is_slot else unit.devices)
    elif what == "bind" and slots:
        slot, taken = chance.choice(slots), books.things()
        pool = offer.pools.get(slot.resource_name, ())
        devices = [unit.device for unit in pool if unit.health.healthy and unit.device not in taken]
        if devices:
            books.granted[slot.key] = replace(slot, devices=(chance.choice(devices),))
    elif what == "end" and books.granted:
        del books.granted[chance.choice(list(books.granted))]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_device_in_use_is_offered_to_another_pod(chance: Random) -> None:
    books, snapshot, resources = InUse(), a_machine(chance), a_configuration(chance)
    now, seen = 0.0, resources
    maker = Offers(HealthHistory(HealthSettings(0, 0, GONE_SECONDS)), lambda: now)
    offer = Offer()
    for _ in range(20):
        seen = with_profiles(resources, snapshot, seen)
        offer = maker.make(seen, snapshot, read(books, with_names=False))
        units = [unit for units in offer.units.values() for unit in units]
        assert len({unit.unit_id for unit in units}) == len(units)
        for unit in (unit for units in offer.claimable.values() for unit in units):
            is_granted = any(unit.device in held(hold) for hold in books.granted.values())
            assert (unit.device in offer.granted) is is_granted
            assert not (unit.health.healthy and is_granted)
        everything = [unit for mine in offer.offered.values() for unit in mine]
        for found in (found for claim in books.claimed.values() for found in claim.devices):
            claimable = offer.claimable.get(found.resource_name, ())
            others = [u for u in everything if u not in claimable and u.health.healthy]
            assert not [u for u in others if found.device in behind(u, snapshot)]
        for hold in books.granted.values():
            others = [u for u in units if u.unit_id not in books.granted]  # kubelet gives none of those to another pod
            assert not [u for u in others if u.health.healthy and behind(u, snapshot) & set(held(hold))]
        for name, pool in offer.pools.items():
            free = [unit for unit in pool if unit.health.healthy and unit.device not in books.things()]
            unbound = [unit for unit in offer.units[name] if unit.health.healthy and not unit.device]
            assert len(unbound) <= len(free)
        now += chance.choice([0.0, GONE_SECONDS])
        if chance.random() < 0.2:
            resources = a_configuration(chance)
        elif chance.random() < 0.2:
            snapshot = a_machine(chance)
        else:
            use(books, offer, chance)
