"""The devices of a late-bound resource → the slots that kubelet is offered. Pure.

kubelet must always find as many slots on a NUMA node as there are devices to be had there, so that the hints it gives
to its topology manager come true: a slot that nobody has stands for a device that nobody has. A device may be bound
to a slot of another NUMA node, if the pod's GPU is nearer to it; then the one has a slot less and the other one more.

A slot that kubelet has granted stays listed until the grant ends, bound or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from agent.config import Resource
from agent.model.health import Health, Reason, unhealthy
from agent.model.unit_id import UnitId, slot_id
from agent.offer.offer import Unit


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the books say of slots."""

    granted: frozenset[str] = frozenset()
    """Slots that kubelet was given, bound or not."""
    bound: Mapping[str, str] = field(default_factory=dict)
    """Slot → its device."""


NOTHING_HELD = Holdings()


def list_slots(resource: Resource, devices: Sequence[Unit], held: Holdings = NOTHING_HELD) -> tuple[Unit, ...]:
    """List a resource's slots. `devices` are the units that it would offer with early binding.

    As many are healthy as devices are that no slot has; a bound one is as healthy as its device.
    """
    by_address = {unit.device: unit for unit in devices}
    bound = {slot: device for slot, device in held.bound.items() if UnitId.parse(slot).is_slot_of(resource.name)}
    waiting = {slot for slot in held.granted if UnitId.parse(slot).is_slot_of(resource.name) and slot not in bound}
    taken = set(bound.values())
    nodes = {unit.numa_node for unit in devices} | {UnitId.parse(slot).numa_node for slot in (*bound, *waiting)}
    limits = _shared_out(resource.slots, devices)
    slots: list[Unit] = []
    for node in sorted(nodes):
        here = {slot: by_address.get(device) for slot, device in bound.items() if UnitId.parse(slot).numa_node == node}
        slots += (_bound(resource, slot, bound[slot], node, unit) for slot, unit in here.items())
        free = [unit for unit in devices if unit.numa_node == node and unit.device not in taken]
        waiting_here = [UnitId.parse(slot) for slot in waiting if UnitId.parse(slot).numa_node == node]
        granted = [slot.text for slot in sorted(waiting_here, key=lambda slot: slot.number)]
        room = len(free) if limits is None else min(len(free), max(0, limits[node] - len(here)))
        names = _names(resource.name, node, granted, room, here)
        slots += _free(resource, names, node, free)
    return tuple(sorted(slots, key=lambda unit: (unit.numa_node, UnitId.parse(unit.unit_id).number)))


def _shared_out(slots: int | None, devices: Sequence[Unit]) -> Counter[int] | None:
    """Share a configured number of slots out to NUMA nodes in proportion to their devices; largest rests first."""
    if slots is None or slots >= len(devices):
        return None
    counts = Counter(unit.numa_node for unit in devices)
    shares = Counter({node: slots * count // len(devices) for node, count in counts.items()})
    by_rest = sorted(counts, key=lambda node: (-(slots * counts[node] % len(devices)), node))
    shares.update(by_rest[: slots - shares.total()])
    return shares


def _names(resource_name: str, node: int, granted: Sequence[str], room: int, bound: Collection[str]) -> list[str]:
    """Name the slots that are not bound: those granted already, then the lowest numbers that are left."""
    names = list(granted)
    number = 0
    while len(names) < room:
        name = slot_id(resource_name, node, number)
        if name not in bound and name not in granted:
            names.append(name)
        number += 1
    return names


def _free(resource: Resource, names: Sequence[str], node: int, free: Sequence[Unit]) -> list[Unit]:
    """Make the slots that are not bound. The first are the healthy ones."""
    healths = [unit.health for unit in sorted(free, key=lambda unit: (not unit.health.healthy, unit.device))]
    beside = free[0].device if free else ""
    return [
        Unit(
            name,
            resource.name,
            resource.kind,
            "",
            healths[i] if i < len(healths) else unhealthy(Reason.NO_FREE_DEVICE),
            node,
            is_slot=True,
            beside=free[i].device if i < len(free) else beside,
        )
        for i, name in enumerate(names)
    ]


def _bound(resource: Resource, slot: str, device: str, node: int, unit: Unit | None) -> Unit:
    health: Health = unit.health if unit is not None else unhealthy(Reason.DEVICE_GONE)
    rdma = unit.rdma_devices if unit is not None else ()
    return Unit(slot, resource.name, resource.kind, device, health, node, rdma, is_slot=True, beside=device)
