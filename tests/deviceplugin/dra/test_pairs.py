"""Which GPU each device is matched by."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from agent.config import Dra, Resource
from agent.placement import Distances
from deviceplugin.dra.devices import pair_up
from tests.deviceplugin.dra.nodes import GPU_NODES, HCA, VF, Offered, late, recorded_node, value
from tests.node import node

ALIAS = "gpu.nvidia.com/uuid"


def ports(name: str) -> list[str]:
    return [d.address for d in recorded_node(name).devices if d.rdma_devices and not d.is_vf]


@pytest.mark.parametrize("name", [name for name in GPU_NODES if name != "efa"])
def test_each_gpu_is_named_by_vfs_that_are_as_near_to_it_as_any(name: str) -> None:
    snapshot = recorded_node(name)
    distances = Distances(snapshot)
    vfs = [d.address for d in snapshot.devices if d.is_vf]
    paired = pair_up(vfs, distances)
    assert set(paired.gpu.values()) == set(distances.gpus)
    for vf, gpu in paired.gpu.items():
        assert distances.distance(vf, gpu) == min(distances.distance(other, gpu) for other in vfs)


@pytest.mark.parametrize("name", GPU_NODES)
def test_whole_adapters_name_as_many_gpus_as_they_can(name: str) -> None:
    distances = Distances(recorded_node(name))
    paired = pair_up(ports(name), distances)
    near = {port: set(gpus) for port, gpus in paired.near.items()}
    assert all(gpu in near[port] for port, gpu in paired.gpu.items())
    assert len(set(paired.gpu.values())) == most_pairs(near)


def most_pairs(near: dict[str, set[str]]) -> int:
    """Count the pairs of a greatest matching, by augmenting paths."""
    port_of: dict[str, str] = {}

    def finds_one(port: str, tried: set[str]) -> bool:
        for gpu in near[port] - tried:
            tried.add(gpu)
            if gpu not in port_of or finds_one(port_of[gpu], tried):
                port_of[gpu] = port
                return True
        return False

    return sum(finds_one(port, set()) for port in near)


@pytest.mark.parametrize(("name", "gpus"), [("a100-8gpu-4nic", 8), ("one-numa-node", 4)])
def test_vfs_of_ports_that_are_as_near_to_several_gpus_are_shared_out_evenly(name: str, gpus: int) -> None:
    snapshot = recorded_node(name)
    vfs = [d.address for d in snapshot.devices if d.is_vf]
    counts = Counter(pair_up(vfs, Distances(snapshot)).gpu.values())
    assert list(counts.values()) == [len(vfs) // gpus] * gpus


def test_an_adapter_that_is_nearest_to_no_gpu_names_none() -> None:
    snapshot = node(rails=3, vfs=1)
    distances = Distances(Offered(snapshot).snapshot)
    without_gpu = type(snapshot)(snapshot.devices, snapshot.gpus[:2])
    paired = pair_up(["0000:12:00.1", "0000:22:00.1", "0000:32:00.1"], Distances(without_gpu))
    assert list(paired.gpu) == ["0000:12:00.1", "0000:22:00.1"]
    assert pair_up([], distances).gpu == {}


@pytest.mark.parametrize("name", [name for name in GPU_NODES if name != "efa"])
def test_bound_early_one_vf_a_gpu_is_matched_by_it_and_bound_late_one_place(name: str) -> None:
    snapshot = recorded_node(name)
    gpus = Counter({gpu.uuid: 1 for gpu in snapshot.gpus})
    for resource in (VF, late(VF)):
        found = Counter(value(d, ALIAS) for d in Offered(snapshot, [resource]).devices if ALIAS in d.attributes)
        assert found == gpus


def test_the_vf_that_is_matched_comes_last_so_that_others_are_taken_before_it() -> None:
    devices = Offered(recorded_node("h100-8gpu")).devices
    assert [ALIAS in device.attributes for device in devices] == [False] * 56 + [True] * 8


@pytest.mark.parametrize("resource", [VF, late(VF), HCA, late(HCA)])
def test_a_gpu_that_nvml_does_not_show_is_near_by_its_address_and_matched_by_nothing(resource: Resource) -> None:
    snapshot = replace(recorded_node("h100-8gpu"), gpus=())
    devices = Offered(snapshot, [resource]).devices
    assert {value(d, "nearGpu") for d in devices if "nearGpu" in d.attributes} == {
        gpu.pci_address for gpu in recorded_node("h100-8gpu").gpus
    }
    assert not any(ALIAS in d.attributes for d in devices)


def test_shares_of_an_adapter_bound_late_are_divided_among_the_gpus_that_it_is_nearest_to() -> None:
    places = Offered(recorded_node("a100-8gpu-4nic"), [late(HCA)]).devices
    assert len(places) == 8
    assert {int(d.capacity["nodefabric.io/shares"]["value"]) for d in places} == {32, 31}


def test_an_adapter_names_all_its_gpus_where_lists_are_allowed() -> None:
    devices = Offered(recorded_node("a100-8gpu-4nic"), [HCA], Dra(list_attributes=True)).devices
    assert [len(device.attributes[ALIAS]["strings"]) for device in devices] == [2, 2, 2, 2]
    assert all(value(d, "nearGpu") in d.attributes[ALIAS]["strings"] for d in devices)
