"""Rails: each GPU with its nearest NIC, for as long as the hardware is what it is."""

from __future__ import annotations

from dataclasses import replace

from agent.config import RailNic, Resource
from agent.edits.build import GpuFiles, build
from agent.model.allocation import Devices, all_of
from agent.model.device import Snapshot
from agent.offer.offer import Unit
from agent.offer.selection import assign
from agent.offer.units import Inputs, Reading, make_offer
from tests.deviceplugin.machines import change, gpu_uuid, node, without

RAIL = Resource("rdma/rail", "rail", nic=RailNic("vf"))
SHARED = replace(RAIL, nic=RailNic("hca", shares=2))


def rails(resource: Resource, snapshot: Snapshot, **kept: Devices) -> dict[str, Unit]:
    sets = {rail: all_of(nics) for rail, nics in kept.items()}
    found = make_offer(Inputs([resource], snapshot, assign([resource], snapshot), Reading(kept=sets)))
    return {unit.unit_id: unit for unit in found.units[resource.name]}


def pairs(resource: Resource, snapshot: Snapshot, **kept: Devices) -> dict[str, str]:
    return {unit.gpu: unit.device for unit in rails(resource, snapshot, **kept).values()}


def test_a_nic_that_a_granted_rail_keeps_is_in_no_other_rail() -> None:
    near = pairs(RAIL, node(rails=2, vfs=1))
    kept = {f"rail-{gpu_uuid(0)}": near[gpu_uuid(1)]}
    assert pairs(RAIL, node(rails=2, vfs=1), **kept) == {gpu_uuid(0): near[gpu_uuid(1)], gpu_uuid(1): near[gpu_uuid(0)]}
    shared = pairs(SHARED, node(rails=2, vfs=0))
    kept = {f"rail-{gpu_uuid(0)}": shared[gpu_uuid(1)]}
    assert set(pairs(SHARED, node(rails=2, vfs=0), **kept).values()) == {
        shared[gpu_uuid(1)]
    }  # whose second share is left


def test_the_nic_of_a_granted_rail_whose_gpu_is_lost_goes_to_no_other_gpu() -> None:
    snapshot = node(rails=2, vfs=1)
    near = pairs(RAIL, snapshot)
    lost = without(replace(snapshot, gpus=snapshot.gpus[1:]), near[gpu_uuid(1)])
    assert pairs(RAIL, lost) == {gpu_uuid(1): near[gpu_uuid(0)]}
    assert pairs(RAIL, lost, **{f"rail-{gpu_uuid(0)}": near[gpu_uuid(0)]}) == {}


def test_a_granted_rail_keeps_its_nic_when_hardware_comes_or_goes() -> None:
    snapshot = node(rails=2, vfs=2)
    (first, second) = (snapshot.devices[1].address, snapshot.devices[2].address)
    assert pairs(RAIL, snapshot)[gpu_uuid(0)] == first
    kept = {f"rail-{gpu_uuid(0)}": second}
    assert pairs(RAIL, snapshot, **kept)[gpu_uuid(0)] == second
    assert pairs(RAIL, without(snapshot, first), **kept)[gpu_uuid(0)] == second
    assert pairs(RAIL, without(snapshot, second), **kept)[gpu_uuid(0)] == first
    assert pairs(RAIL, snapshot, **{"rail-GPU-of-before": second}) == pairs(RAIL, snapshot)


def test_the_health_of_a_rail_is_that_of_its_worse_half() -> None:
    snapshot = node(rails=2)
    nic = pairs(RAIL, snapshot)[gpu_uuid(1)]
    found = rails(RAIL, change(snapshot, nic, driver=None))
    assert [unit.health.reason for unit in found.values()] == ["", "NoDriver"]
    lost = replace(snapshot, gpus=tuple(replace(g, ailments=("GpuLost",)) for g in snapshot.gpus))
    found = rails(RAIL, change(lost, nic, driver=None))
    assert [unit.health.reason for unit in found.values()] == ["GpuLost", "GpuLost"]


def test_a_container_gets_both_halves_of_its_rail() -> None:
    snapshot = node(rails=2)
    resource = replace(RAIL, nic=RailNic("hca"), management=True)
    unit = rails(resource, snapshot)[f"rail-{gpu_uuid(1)}"]
    given = build(resource, [unit], snapshot, GpuFiles(cdi_names=frozenset({gpu_uuid(1)})))
    assert given.cdi_devices == (f"nvidia.com/gpu={gpu_uuid(1)}",)
    assert [node.path for node in given.devices] == [
        f"/dev/infiniband/{name}" for name in ("uverbs1", "umad1", "issm1", "rdma_cm")
    ]
