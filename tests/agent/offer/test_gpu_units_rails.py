"""Rails: each GPU with its nearest NIC, for as long as the hardware is what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agent.config import RailNic, Resource, Select, parse_pf
from agent.edits.build import GpuFiles, build
from agent.hardware import recorded
from agent.hardware.sysfs import scan as sysfs
from agent.model.allocation import Devices, all_of
from agent.model.device import Snapshot
from agent.model.topology import Locality
from agent.model.unit_id import MAX_UNIT_ID
from agent.offer.offer import Unit
from agent.offer.selection import assign
from agent.offer.units import Inputs, Reading, make_offer
from agent.placement import Distances
from tests.deviceplugin.machines import change, gpu_uuid, node, without

RAIL = Resource("rdma/rail", "rail", nic=RailNic("vf"))
SHARED = replace(RAIL, nic=RailNic("hca", shares=2))


def rails(resource: Resource, snapshot: Snapshot, **kept: Devices) -> dict[str, Unit]:
    sets = {rail: all_of(nics) for rail, nics in kept.items()}
    found = make_offer(Inputs([resource], snapshot, assign([resource], snapshot), Reading(kept=sets)))
    return {unit.unit_id: unit for unit in found.units[resource.name]}


def pairs(resource: Resource, snapshot: Snapshot, **kept: Devices) -> dict[str, str]:
    return {unit.gpu: unit.device for unit in rails(resource, snapshot, **kept).values()}


def test_a_rail_is_a_gpu_with_a_vf_below_its_switch() -> None:
    snapshot = node(rails=4)
    distances = Distances(snapshot)
    found = rails(RAIL, snapshot)
    assert list(found) == [f"rail-{gpu_uuid(n)}" for n in range(4)]
    assert all(len(unit_id) <= MAX_UNIT_ID for unit_id in found)
    assert all(distances.distance(unit.gpu, unit.device) is Locality.PIX for unit in found.values())
    assert [unit.numa_node for unit in found.values()] == [0, 0, 1, 1]


def test_on_a_recorded_node_every_gpu_has_a_rail_of_its_own_port(tmp_path: Path) -> None:
    recording = recorded.load(recorded.find("h100-8gpu"))
    recorded.unpack(recording, tmp_path)
    scanned = replace(sysfs.scan(tmp_path), gpus=recording.gpus)
    found = pairs(replace(RAIL, nic=RailNic("hca", Select(vendors=(0x15B3,)), shares=1)), scanned)
    assert len(found) == len(set(found.values())) == 8
    assert {Distances(scanned).distance(gpu, nic) for gpu, nic in found.items()} == {Locality.PIX}


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


def test_pairs_do_not_depend_on_health_or_on_who_has_them() -> None:
    snapshot = node(rails=4)
    before = pairs(RAIL, snapshot)
    sick = change(snapshot, before[gpu_uuid(1)], driver=None)
    assert pairs(RAIL, sick) == before


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


def test_shares_of_an_hca_make_a_rail_each() -> None:
    snapshot = node(rails=4, vfs=0)
    two = without(snapshot, *(d.address for d in snapshot.devices if d.netdev and d.netdev.name in ("rail1", "rail3")))
    distances = Distances(two)
    found = pairs(SHARED, two)
    assert len(found) == 4
    assert all(distances.distance(gpu, nic) <= Locality.SYS for gpu, nic in found.items())
    assert sorted(found.values()) == sorted(2 * sorted(set(found.values())))
    assert found[gpu_uuid(0)] != found[gpu_uuid(2)]


def test_a_gpu_that_finds_no_nic_makes_no_rail() -> None:
    snapshot = node(rails=3, vfs=1)
    gone = without(snapshot, pairs(RAIL, snapshot)[gpu_uuid(1)])
    found = pairs(RAIL, gone)
    assert found.keys() == {gpu_uuid(0), gpu_uuid(2)}


def test_a_container_gets_both_halves_of_its_rail() -> None:
    snapshot = node(rails=2)
    resource = replace(RAIL, nic=RailNic("hca"), management=True)
    unit = rails(resource, snapshot)[f"rail-{gpu_uuid(1)}"]
    given = build(resource, [unit], snapshot, GpuFiles(cdi_names=frozenset({gpu_uuid(1)})))
    assert given.cdi_devices == (f"nvidia.com/gpu={gpu_uuid(1)}",)
    assert [node.path for node in given.devices] == [
        f"/dev/infiniband/{name}" for name in ("uverbs1", "umad1", "issm1", "rdma_cm")
    ]


def test_the_variables_of_a_rail_name_its_vf_and_its_gpu() -> None:
    snapshot = node(rails=2)
    unit = rails(RAIL, snapshot)[f"rail-{gpu_uuid(0)}"]
    given = build(RAIL, [unit], snapshot)
    assert dict(given.envs) == {"NVIDIA_VISIBLE_DEVICES": gpu_uuid(0), "PCIDEVICE_RDMA_RAIL": unit.device}


def test_the_nics_of_rails_are_selected_like_any_others() -> None:
    snapshot = node(rails=2)
    narrow = replace(RAIL, nic=RailNic("vf", Select(pf=(parse_pf("rail0#3"), parse_pf("rail1#3")))))
    chosen = {snapshot.by_address[nic].vf_index for nic in pairs(narrow, snapshot).values()}
    assert chosen == {3}
