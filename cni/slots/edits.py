"""What a container gets for a bound slot: containerEdits of its CDI spec. Pure.

The variables name all of the container's devices of the resource, as they do with early binding, and stand alike in
the spec of each of its slots; a slot's device nodes are those of its own device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.config import Resource
from agent.edits.build import edits_by_device, pcidevice_name, variables_of_container
from agent.kubelet.checkpoint import Held
from agent.model.device import Snapshot
from agent.offer.offer import Unit
from cni.slots.choice import Choice
from cni.slots.wishes import Wish

Find = Callable[[str, str], Unit | None]
"""Finds a unit by the names of its resource and its own."""


@dataclass(frozen=True, slots=True)
class Given:
    """What one slot brings."""

    wish: Wish
    slot: str
    device: str
    edits: Mapping[str, Any]


def of_pod(
    chosen: Sequence[Choice],
    containers: Sequence[Held],
    resources: Sequence[Resource],
    units: Mapping[str, Unit],
    snapshot: Snapshot,
    find: Find,
) -> tuple[Given, ...]:
    """Work out what each slot of a pod brings.

    `units` are the chosen devices by address. Raises UnitUnhealthy for a device that lacks what a container needs.
    """
    by_name = {resource.name: resource for resource in resources}
    found: list[Given] = []
    for choice in chosen:
        wish, resource = choice.wish, by_name[choice.wish.resource_name]
        held = [
            (by_name[other.wish.resource_name], [units[device] for device in other.devices])
            for other in chosen
            if other.wish.container == wish.container
        ]
        held += _early(wish.container, containers, resources, find)
        variables = variables_of_container(held, snapshot)
        if (
            resource.kind == "hca"
        ):  # which of several is whose must be told, also to who finds the spec without the books
            variables = ((pcidevice_name(resource.name), ",".join(choice.devices)), *variables)
        edits = edits_by_device(resource, [units[device] for device in choice.devices], snapshot, variables)
        found += (Given(wish, slot, device, edits[device]) for slot, device in choice.pairs)
    return tuple(found)


def _early(
    container: str, containers: Sequence[Held], resources: Sequence[Resource], find: Find
) -> list[tuple[Resource, list[Unit]]]:
    """List what a container has of early-bound resources with helper variables: they name these devices, too."""
    ids = next((held.units for held in containers if held.container == container), {})
    early = [resource for resource in resources if resource.binding == "early" and resource.environment]
    units = [(resource, [find(resource.name, i) for i in ids.get(resource.name, ())]) for resource in early]
    return [(resource, [unit for unit in mine if unit is not None]) for resource, mine in units]
