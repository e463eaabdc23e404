"""What pods hold is offered to no other pod, whatever becomes of configuration and hardware meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import HealthSettings, RailNic, Resource, Select, parse_pf
from agent.health import HealthBook
from agent.model.allocation import Attachment, Binding, Grant, PodRef, Quarantine
from agent.model.device import MigDevice, Snapshot
from agent.model.gpu_ids import RAIL_PREFIX
from agent.model.slots import is_slot_id
from deviceplugin.allocation import Offer
from deviceplugin.books import read
from deviceplugin.gpu_response import NO_GPU_FILES
from deviceplugin.gpu_units import with_profiles
from deviceplugin.offers import Offers
from deviceplugin.unit import Unit
from tests.deviceplugin.machines import change, node, without

GONE_SECONDS = 5.0


@dataclass
class InUse:
    """The part of the books that lists are made of."""

    granted: dict[str, Grant] = field(default_factory=dict)
    bound: dict[str, Binding] = field(default_factory=dict)

    def grants(self) -> tuple[Grant, ...]:
        return tuple(self.granted.values())

    def bindings(self) -> tuple[Binding, ...]:
        return tuple(self.bound.values())

    def attachments(self) -> tuple[Attachment, ...]:
        return ()

    def quarantines(self) -> tuple[Quarantine, ...]:
        return ()

    def pod_of(self, unit_id: str) -> PodRef | None:
        return None

    def subscribe(self, listener: object) -> None:
        return None

    def grant(self, resource_name: str, units: object) -> None:
        return None

    def things(self) -> set[str]:
        """Name all devices in use."""
        return {thing for grant in self.granted.values() for thing in held(grant)}


def held(grant: Grant) -> Iterator[str]:
    """Name the devices that a grant brings: VFs, GPUs and slices."""
    yield from (grant.device,) if grant.device else ()
    if grant.unit_id.startswith(RAIL_PREFIX):
        yield grant.unit_id.removeprefix(RAIL_PREFIX)


def behind(unit: Unit, snapshot: Snapshot) -> set[str]:
    """Name the devices that a unit would bring, a cut GPU's slices among them."""
    found = {unit.device, unit.gpu} - {""}
    return found | {part.uuid for gpu in snapshot.gpus if gpu.uuid in found for part in gpu.mig_devices}


def a_configuration(chance: Random) -> tuple[Resource, ...]:
    names = chance.sample(["a/x", "a/y", "a/z"], chance.randint(1, 3))
    return tuple(a_resource(name, chance) for name in names)


def a_resource(name: str, chance: Random) -> Resource:
    pf = chance.choice(["", "rail0", "rail1#0", "rail1"])
    select = Select(pf=(parse_pf(pf),)) if pf else Select()
    kind = chance.choice(["vf", "vf", "rail", "gpu"])
    if kind == "vf":
        return Resource(name, "vf", select, binding=chance.choice(["early", "late"]))
    if kind == "rail":
        return Resource(name, "rail", nic=RailNic("vf", select))
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
    slots = [grant for grant in books.granted.values() if is_slot_id(grant.unit_id) and not grant.device]
    what = chance.choice(["grant", "grant", "bind", "end"])
    if what == "grant" and free:
        unit = chance.choice(free)
        device = "" if unit.is_slot else unit.device
        books.granted[unit.unit_id] = Grant(unit.unit_id, unit.resource_name, device, 0.0)
    elif what == "bind" and slots:
        slot, taken = chance.choice(slots), books.things()
        pool = offer.pools.get(slot.resource_name, ())
        devices = [unit.device for unit in pool if unit.health.healthy and unit.device not in taken]
        if devices:
            device, pod = chance.choice(devices), PodRef("default", "p", "uid-p")
            books.granted[slot.unit_id] = replace(slot, device=device)
            books.bound[slot.unit_id] = Binding(slot.unit_id, slot.resource_name, "vf", device, "c", "s", "", pod, {})
    elif what == "end" and books.granted:
        ended = chance.choice(list(books.granted))
        del books.granted[ended]
        books.bound.pop(ended, None)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_device_in_use_is_offered_to_another_pod(chance: Random) -> None:
    books, snapshot, resources = InUse(), a_machine(chance), a_configuration(chance)
    now, seen = 0.0, resources
    maker = Offers(HealthBook(HealthSettings(0, 0, GONE_SECONDS)), lambda: now)
    offer = Offer()
    for _ in range(20):
        seen = with_profiles(resources, snapshot, seen)
        offer = maker.make(seen, snapshot, NO_GPU_FILES, read(books, with_names=False, with_slots=True)) or offer
        units = [unit for units in offer.units.values() for unit in units]
        assert len({unit.unit_id for unit in units}) == len(units)
        for grant in books.granted.values():
            others = [u for u in units if (u.resource_name, u.unit_id) != (grant.resource_name, grant.unit_id)]
            assert not [u for u in others if u.health.healthy and behind(u, snapshot) & set(held(grant))]
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
