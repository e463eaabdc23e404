"""What a pod's containers have: slots, and the GPUs that the slots' devices should be near to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent.model.gpu_ids import gpus_of
from agent.model.slots import is_slot_of


@dataclass(frozen=True, slots=True)
class Held:
    """What kubelet gave to one container."""

    container: str
    units: Mapping[str, tuple[str, ...]]
    """Resource name → device IDs, of all plugins."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One container's slots of one resource."""

    container: str
    resource_name: str
    slots: tuple[str, ...]
    """Those that are to be bound for this container."""
    gpus: tuple[str, ...] = ()
    """UUIDs, in the driver's order."""


def wishes(
    containers: Sequence[Held],
    resource_names: Collection[str],
    find_gpu: Callable[[str], str | None],
    gpu_order: Sequence[str],
    own_gpus: Collection[str] = (),
) -> tuple[Wish, ...]:
    """List what is to be bound for a pod, container after container.

    A slot that several containers have (an init container's is given on to the others) is bound once, for the
    first in the list that has it: so list the others before init containers. A container with slots and no GPU
    wants to be near those GPUs of the pod whose containers have no slots, or else to all of the pod's.
    """
    gpus = {held.container: _gpus(held, find_gpu, gpu_order, own_gpus) for held in containers}
    slots: dict[tuple[str, str], tuple[str, ...]] = {}
    seen = set[str]()
    for held in containers:
        for name in sorted(set(held.units) & set(resource_names)):
            mine = tuple(dict.fromkeys(u for u in held.units[name] if is_slot_of(name, u) and u not in seen))
            seen.update(mine)
            if mine:
                slots[held.container, name] = mine
    users = {container for container, _ in slots}
    others = _merged((found for container, found in gpus.items() if container not in users), gpu_order)
    others = others or _merged(gpus.values(), gpu_order)
    return tuple(Wish(container, name, mine, gpus[container] or others) for (container, name), mine in slots.items())


def _gpus(
    held: Held, find_gpu: Callable[[str], str | None], order: Sequence[str], own_gpus: Collection[str]
) -> tuple[str, ...]:
    found = gpus_of(((name, unit) for name, units in held.units.items() for unit in units), find_gpu, own_gpus)
    return tuple(uuid for uuid in order if uuid in found)


def _merged(found: Iterable[tuple[str, ...]], order: Sequence[str]) -> tuple[str, ...]:
    uuids = {uuid for gpus in found for uuid in gpus}
    return tuple(uuid for uuid in order if uuid in uuids)
