"""Units of k8s-rdma-shared-dev-plugin's pools: so many as the configuration says, each of them all adapters.

Their IDs are "0" to "N-1", the same for every pool, as kubelet's checkpoint of a running node has them. So they are
unique within their resource only, and neither the books nor look-ups by ID alone know them.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.config import Resource, SharedPool
from agent.model.device import NO_NUMA_NODE
from deviceplugin.unit import Unit


def pool_units(resource: Resource, adapters: Sequence[Unit]) -> tuple[Unit, ...]:
    """List a pool's units. `adapters` has one unit for each adapter of the pool; without any the list is empty.

    The units are healthy while any adapter is. They have no NUMA node, as the adapters may be anywhere.
    """
    assert isinstance(resource.compat, SharedPool)
    if not adapters:
        return ()
    health = next((unit.health for unit in adapters if unit.health.healthy), adapters[0].health)
    names = tuple(sorted(name for unit in adapters for name in unit.rdma_devices))
    return tuple(
        Unit(str(number), resource.name, "hca", "", health, NO_NUMA_NODE, names)
        for number in range(resource.compat.hca_max)
    )


def is_counted(unit: Unit) -> bool:
    """Tell whether a unit is one of these: it stands for nothing but a number of containers."""
    return not unit.device and not unit.is_slot


def counted_unit(units: Sequence[Unit], unit_id: str) -> Unit | None:
    """Find a unit of a pool by its ID."""
    number = int(unit_id) if unit_id.isascii() and unit_id.isdecimal() and len(unit_id) < 9 else -1
    unit = units[number] if 0 <= number < len(units) else None
    return unit if unit is not None and unit.unit_id == unit_id else None
