"""What a pod's containers have (slots, and the GPUs that these should be near to), and which devices they get. Pure.

The nearest to the pod's GPUs, over all its containers. Without GPUs a slot gets a device of its own NUMA node, where
kubelet has put the container's CPUs; only if that has none left, one of another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent.kubelet.checkpoint import Held
from agent.model.unit_id import UnitId
from agent.offer.offer import Unit
from agent.placement import Distances, Group, match_groups


@dataclass(frozen=True, slots=True)
class Wish:
    """One container's slots of one resource."""

    container: str
    resource_name: str
    slots: tuple[str, ...]
    """Those that are to be bound for this container."""
    gpus: tuple[str, ...] = ()
    """As `Distances.gpus_of` gives them."""


def wishes(
    containers: Sequence[Held],
    resource_names: Collection[str],
    distances: Distances,
    own_gpus: Collection[str] = (),
    own_nics: Collection[str] = (),
) -> tuple[Wish, ...]:
    """List what is to be bound for a pod, container after container.

    `own_gpus` and `own_nics` are names of resources that are, or are not, GPUs by configuration, whatever their name.

    A slot that several containers have (an init container's is given on to the others) is bound once, for the
    first in the list that has it: so list the others before init containers. A container with slots and no GPU
    wants to be near those GPUs of the pod whose containers have no slots, or else to all of the pod's.
    """
    gpus = {held.container: _gpus(held, distances, own_gpus, own_nics) for held in containers}
    slots: dict[tuple[str, str], tuple[str, ...]] = {}
    seen = set[str]()
    for held in containers:
        for name in sorted(set(held.units) & set(resource_names)):
            mine = tuple(
                dict.fromkeys(u for u in held.units[name] if UnitId.parse(u).is_slot_of(name) and u not in seen)
            )
            seen.update(mine)
            if mine:
                slots[held.container, name] = mine
    users = {container for container, _ in slots}
    others = _merged((found for container, found in gpus.items() if container not in users), distances.gpus)
    others = others or _merged(gpus.values(), distances.gpus)
    return tuple(Wish(container, name, mine, gpus[container] or others) for (container, name), mine in slots.items())


def _gpus(held: Held, distances: Distances, own_gpus: Collection[str], own_nics: Collection[str]) -> tuple[str, ...]:
    units = ((name, unit) for name, units in held.units.items() if name not in own_nics for unit in units)
    return distances.gpus_of(units, own_gpus, held.numa_nodes, held.files)


def _merged(found: Iterable[tuple[str, ...]], order: Sequence[str]) -> tuple[str, ...]:
    """List GPUs once each, in this order, and places of which nothing more is known as often as they come."""
    everything = [gpu for gpus in found for gpu in gpus]
    return (*(gpu for gpu in order if gpu in everything), *sorted(gpu for gpu in everything if gpu not in order))


@dataclass(frozen=True, slots=True)
class Choice:
    """The devices of one wish."""

    wish: Wish
    pairs: tuple[tuple[str, str], ...]
    """(slot, PCI address), the devices in the order of the GPUs that they serve."""

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for _, device in self.pairs)


def choose(
    distances: Distances, wishes: Sequence[Wish], free: Sequence[Unit], load: Mapping[str, int], *, spread: bool = True
) -> tuple[Choice, ...] | None:
    """Choose from one resource's free devices for all of a pod's wishes of this resource; None if they are too few.

    `load` counts what is in use of a port (a PF, or an adapter of its own). Without `spread` one port is filled before
    another.
    """
    left = {unit.device: unit.numa_node for unit in free}
    groups = [Group(tuple(UnitId.parse(slot).numa_node for slot in wish.slots), wish.gpus) for wish in wishes]
    found = match_groups(distances, groups, left, load, spread=spread)
    if found is None:
        return None
    return tuple(Choice(wish, _by_numa(wish.slots, devices, left)) for wish, devices in zip(wishes, found, strict=True))


def _by_numa(slots: Sequence[str], devices: Sequence[str], nodes: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """Give each device to a slot of its NUMA node, as far as there is one: then the lists need not change."""
    waiting = list(slots)
    pairs: dict[str, str] = {}
    for device in devices:
        own = next((slot for slot in waiting if UnitId.parse(slot).numa_node == nodes[device]), None)
        if own is not None:
            waiting.remove(own)
            pairs[device] = own
    for device in devices:
        if device not in pairs:
            pairs[device] = waiting.pop(0)
    return tuple((pairs[device], device) for device in devices)
