"""Which devices a pod's slots get. Pure.

The nearest to the pod's GPUs, over all its containers. Without GPUs a slot gets a device of its own NUMA node, where
kubelet has put the container's CPUs; only if that has none left, one of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.model.unit_id import UnitId
from agent.offer.offer import Unit
from agent.placement import Distances, Group, match_groups
from cni.slots.wishes import Wish


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
