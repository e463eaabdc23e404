"""Which device stands for each late-bound result of a claim. Pure.

A request that selects, or that a constraint is about, gets a device of the place that the scheduler has chosen; any
other the nearest to its container's GPUs. Each result of a claim gets another device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from agent.model.device import NO_NUMA_NODE
from agent.offer.offer import Unit
from agent.placement import Distances, Group, match_groups, match_nics


@dataclass(frozen=True, slots=True)
class LateWish:
    """One result for which a device is to be chosen."""

    place: tuple[str, ...]
    """PCI addresses of the devices that the scheduler takes for equal."""
    is_pinned: bool
    """Whether it must be one of these."""
    container: int | None = None
    """Number of the container that it is for, if that is known."""


def choose(
    distances: Distances,
    wishes: Sequence[LateWish],
    free: Sequence[Unit],
    gpus: Mapping[int | None, Sequence[str]],
    load: Mapping[str, int],
    *,
    spread: bool = True,
) -> tuple[str, ...] | None:
    """Choose from one resource's free devices for all of a claim's wishes of it, in their order; None if too few.

    `gpus` are the UUIDs for each container, under None those of the pod; `load` counts what is in use of a port.
    Without `spread` one port is filled before another.
    """
    nodes = {unit.device: unit.numa_node for unit in free}
    load = Counter(load)
    chosen: dict[int, str] = {}

    def take(wish: int, devices: Collection[str], near: Sequence[str]) -> bool:
        found = match_nics(distances, near, sorted(devices, key=distances.order), 1, load, spread=spread)
        for device in found:
            chosen[wish] = device
            del nodes[device]
            load[distances.port(device)] += 1
        return bool(found)

    for i, wish in enumerate(wishes):
        if wish.is_pinned and not take(i, nodes.keys() & set(wish.place), ()):
            return None
    open_ones = [i for i, wish in enumerate(wishes) if not wish.is_pinned]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i in open_ones:
        container = wishes[i].container
        near = tuple(gpus.get(container, ())) or tuple(gpus.get(None, ()))
        if near:
            # Containers with the same GPUs are one: none of them is nearer to these than another.
            groups.setdefault(near, []).append(i)
    asked = [Group((NO_NUMA_NODE,) * len(members), near) for near, members in groups.items()]
    found = match_groups(distances, asked, nodes, load, spread=spread)
    if found is None:
        return None
    for members, devices in zip(groups.values(), found, strict=True):
        for i, device in zip(members, devices, strict=True):
            chosen[i] = device
            del nodes[device]
            load[distances.port(device)] += 1
    for i in open_ones:
        if i not in chosen and not take(i, nodes.keys() & set(wishes[i].place), ()) and not take(i, nodes.keys(), ()):
            return None
    return tuple(chosen[i] for i in range(len(wishes)))
