"""Rails: a GPU with the NIC that is nearest to it, as one unit. Pure.

The pairs are an exact matching over all GPUs and NICs of the resource, whatever their health and whoever has them, so
they stay as they are for as long as the hardware does. A rail that is granted keeps the NIC it was granted with, even
if other hardware comes or goes. A rail is called by its GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from agent.config import Resource
from agent.model.gpu_ids import RAIL_PREFIX
from agent.placement import Terrain, choose_pairs
from deviceplugin.unit import Unit

NOTHING_KEPT: Mapping[str, str] = MappingProxyType({})


def list_rails(
    resource: Resource,
    terrain: Terrain,
    gpus: Sequence[Unit],
    nics: Sequence[Unit],
    kept: Mapping[str, str] = NOTHING_KEPT,
) -> tuple[Unit, ...]:
    """List a resource's rails, in the driver's order of the GPUs. A GPU that finds no NIC makes none.

    `gpus` and `nics` are units as resources of these kinds would offer them: an HCA's share is a NIC for one GPU.
    `kept` maps rails that are granted to their NIC.
    """
    by_uuid = {unit.device: unit for unit in gpus}
    by_address = {unit.device: unit for unit in nics}
    room = Counter(unit.device for unit in nics)
    pairs: dict[str, str] = {}
    for rail, nic in kept.items():
        uuid = rail.removeprefix(RAIL_PREFIX)
        if rail == rail_id(uuid) and room[nic]:
            room[nic] -= 1  # also of a GPU that is lost: its pod has the NIC still
            if uuid in by_uuid:
                pairs[uuid] = nic
    rest = [uuid for uuid in terrain.gpus if uuid in by_uuid and uuid not in pairs]
    pairs |= choose_pairs(terrain, rest, sorted(room.elements()), len(rest))
    return tuple(_rail(resource, by_uuid[uuid], by_address[pairs[uuid]]) for uuid in terrain.gpus if uuid in pairs)


def rail_id(uuid: str) -> str:
    """Name the rail of a GPU: rail-GPU-5c3a9f60-…"""
    return f"{RAIL_PREFIX}{uuid}"


def nic_resource(resource: Resource) -> Resource:
    """Give the resource that the NICs of rails would be units of."""
    nic = resource.nic
    return replace(resource, kind=nic.kind, select=nic.select, shares=nic.shares)


def gpu_resource(resource: Resource) -> Resource:
    """Give the resource that the GPUs of rails would be units of."""
    return replace(resource, kind="gpu", select=resource.gpu)


def _rail(resource: Resource, gpu: Unit, nic: Unit) -> Unit:
    return Unit(
        unit_id=rail_id(gpu.device),
        resource_name=resource.name,
        kind="rail",
        device=nic.device,
        health=nic.health if gpu.health.healthy else gpu.health,
        numa_node=gpu.numa_node,
        rdma_devices=nic.rdma_devices,
        alternative=nic.alternative,
        gpu=gpu.device,
    )
