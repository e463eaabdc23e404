"""Which devices a pod's slots get. Pure.

The nearest to the pod's GPUs, by an exact matching over all its containers. Without GPUs a slot gets a device of its
own NUMA node, where kubelet has put the container's CPUs; only if that has none left, one of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.late.wishes import Wish
from agent.model.slots import numa_node_of
from agent.placement import Terrain, match_nics
from deviceplugin.unit import Unit


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
    terrain: Terrain, wishes: Sequence[Wish], free: Sequence[Unit], load: Mapping[str, int]
) -> tuple[Choice, ...] | None:
    """Choose from one resource's free devices for all of a pod's wishes of this resource; None if they are too few.

    `load` counts what is in use of a port (a PF, or an adapter of its own).
    """
    if sum(len(wish.slots) for wish in wishes) > len(free):
        return None
    left = {unit.device: unit.numa_node for unit in free}
    load = Counter(load)
    chosen: dict[Wish, tuple[str, ...]] = {}
    # One GPU each: all containers at once, so that none takes what is another's nearest.
    even = [wish for wish in wishes if len(wish.slots) == len(wish.gpus)]
    found = match_nics(
        terrain, [gpu for wish in even for gpu in wish.gpus], tuple(left), sum(len(wish.slots) for wish in even), load
    )
    for wish in even:
        chosen[wish], found = found[: len(wish.slots)], found[len(wish.slots) :]
        load.update(map(terrain.port, chosen[wish]))
    for wish in wishes:
        if wish not in chosen:
            taken = {device for devices in chosen.values() for device in devices}
            rest = {device: node for device, node in left.items() if device not in taken}
            chosen[wish] = _for_container(terrain, wish, rest, load)
            load.update(map(terrain.port, chosen[wish]))
    return tuple(Choice(wish, _by_numa(wish.slots, chosen[wish], left)) for wish in wishes)


def _for_container(terrain: Terrain, wish: Wish, free: Mapping[str, int], load: Mapping[str, int]) -> tuple[str, ...]:
    if wish.gpus:
        return match_nics(terrain, wish.gpus, tuple(free), len(wish.slots), load)
    chosen: list[str] = []
    for node in sorted({numa_node_of(slot) for slot in wish.slots}):
        wanted = sum(numa_node_of(slot) == node for slot in wish.slots)
        chosen += match_nics(terrain, (), [d for d, n in free.items() if n == node], wanted, load)
    missing = len(wish.slots) - len(chosen)
    return (*chosen, *match_nics(terrain, (), [d for d in free if d not in chosen], missing, load))


def _by_numa(slots: Sequence[str], devices: Sequence[str], nodes: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """Give each device to a slot of its NUMA node, as far as there is one: then the lists need not change."""
    waiting = list(slots)
    pairs: dict[str, str] = {}
    for device in devices:
        own = next((slot for slot in waiting if numa_node_of(slot) == nodes[device]), None)
        if own is not None:
            waiting.remove(own)
            pairs[device] = own
    for device in devices:
        if device not in pairs:
            pairs[device] = waiting.pop(0)
    return tuple((pairs[device], device) for device in devices)
