"""NICs bound late beside GPUs that other vendors' plugins gave, on nodes where nothing of NVIDIA's answers."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.kubelet.checkpoint import FILE
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, PodDevices
from agent.model.topology import Locality
from proto.deviceplugin.v1beta1 import api_pb2
from tests.agent.books import open_books
from tests.cni.slots.binding import POD, Rig, call, slot, stock_of
from tests.deviceplugin.dra.nodes import recorded_node

AMD_GPU = "amd.com/gpu"


@pytest.fixture
def amd(tmp_path: Path) -> Iterator[Rig]:
    with open_books(tmp_path) as books:
        yield Rig(tmp_path, books, stock_of(recorded_node("mi300x-8gpu")))


def bound_near(rig: Rig, resource: str, gpus: tuple[str, ...], count: int) -> list[str]:
    """Let a pod have these GPUs and so many slots; give what is bound, in the order of the slots."""
    slots = tuple(slot(n) for n in range(count))
    rig.grant(POD, *slots)
    devices = (DeviceAssignment("rdma/vf", slots), DeviceAssignment(resource, gpus))
    rig.pods[POD] = PodDevices(POD, (ContainerDevices("worker", devices),))
    found = rig.bind(call("c1"))
    return [found[each] for each in slots]


def test_eight_of_eight_vfs_come_beside_the_gpus_that_amds_plugin_gave(amd: Rig) -> None:
    distances = amd.stock.distances
    gpus = [gpu.pci_address for gpu in amd.stock.snapshot.all_gpus]
    assert len(gpus) == 8
    assert amd.stock.snapshot.gpus == ()
    given = tuple(random.Random(7).sample(gpus, 8))
    vfs = bound_near(amd, AMD_GPU, given, 8)
    beside = {gpu: [vf for vf in vfs if distances.distance(gpu, vf) is Locality.PXB] for gpu in gpus}
    assert {gpu: len(near) for gpu, near in beside.items()} == dict.fromkeys(gpus, 1)


@pytest.mark.parametrize("number", [0, 5])
def test_a_single_vf_is_beside_the_one_gpu(amd: Rig, number: int) -> None:
    gpu = amd.stock.snapshot.all_gpus[number].pci_address
    (vf,) = bound_near(amd, AMD_GPU, (gpu,), 1)
    assert amd.stock.distances.distance(gpu, vf) is Locality.PXB


def test_an_address_of_no_gpu_resource_draws_nothing_near(amd: Rig) -> None:
    gpu = amd.stock.snapshot.all_gpus[5].pci_address
    (vf,) = bound_near(amd, "example.com/disk", (gpu,), 1)
    assert amd.stock.snapshot.by_address[vf].numa_node == 0, "the slot's own"


def test_a_gpu_whose_id_says_nothing_draws_its_nic_to_the_numa_node_that_kubelet_tells(amd: Rig) -> None:
    slots = tuple(slot(n) for n in range(3))
    amd.grant(POD, *slots)
    gaudis = [DeviceAssignment("habana.ai/gaudi", (f"AN2400{n}",), (node,)) for n, node in enumerate((1, 0, 1))]
    amd.pods[POD] = PodDevices(POD, (ContainerDevices("worker", (DeviceAssignment("rdma/vf", slots), *gaudis)),))
    bound = amd.bind(call("c1")).values()
    assert sorted(amd.stock.snapshot.by_address[vf].numa_node for vf in bound) == [0, 1, 1]
    assert len({amd.stock.distances.port(vf) for vf in bound}) == 3


def test_kubelets_word_counts_nothing_against_a_known_address(amd: Rig) -> None:
    slots = (slot(0),)
    gpu = amd.stock.distances.gpus[6]
    amd.grant(POD, *slots)
    devices = (DeviceAssignment("rdma/vf", slots), DeviceAssignment(AMD_GPU, (gpu,), (0,)))
    amd.pods[POD] = PodDevices(POD, (ContainerDevices("worker", devices),))
    (vf,) = amd.bind(call("c1")).values()
    assert amd.stock.distances.distance(gpu, vf) is Locality.PXB


def answer(*paths: str) -> str:
    files = [api_pb2.DeviceSpec(host_path=path, container_path=path, permissions="rw") for path in paths]
    return base64.b64encode(api_pb2.ContainerAllocateResponse(devices=files).SerializeToString()).decode()


GAUDI, NPU = "habana.ai/gaudi", "example.com/npu"
SEVENTH = answer("/dev/kfd", "/dev/dri/card6", "/dev/dri/renderD134")


@pytest.mark.parametrize(
    ("resource", "entry", "near"),
    [
        (GAUDI, {"AllocResp": SEVENTH}, 6),
        (NPU, {"AllocResp": SEVENTH}, 6),  # of no plugin that is known
        (GAUDI, {"AllocResp": SEVENTH, "ResourceName": NPU}, None),
        (GAUDI, {"AllocResp": SEVENTH, "ContainerName": "other"}, None),
        (GAUDI, {"AllocResp": SEVENTH, "PodUID": "uid-b"}, None),
        (GAUDI, {"AllocResp": answer("/dev/vfio/6", "/dev/dri/card66", "/tmp/card6", "")}, None),
        (GAUDI, {"AllocResp": "not Base64"}, None),
        (GAUDI, {"AllocResp": base64.b64encode(b"no message").decode()}, None),
        (GAUDI, {"AllocResp": ["a list"]}, None),
        (GAUDI, {"DeviceIDs": 7}, None),
    ],
)
def test_a_gpu_whose_id_says_nothing_is_found_by_the_device_files_that_kubelet_keeps(
    amd: Rig, resource: str, entry: dict[str, Any], near: int | None
) -> None:
    own = {"PodUID": POD.uid, "ContainerName": "worker", "ResourceName": resource, "DeviceIDs": {"1": ["AN24001234"]}}
    (amd.folder / FILE).parent.mkdir()
    (amd.folder / FILE).write_text(json.dumps({"Data": {"PodDeviceEntries": [own | entry]}}))
    (vf,) = bound_near(amd, resource, ("AN24001234",), 1)
    distances = amd.stock.distances
    beside = [n for n, gpu in enumerate(distances.gpus) if distances.distance(gpu, vf) is Locality.PXB]
    assert beside == [near if near is not None else 0], "else the slot's own NUMA node, and there the first"


def test_all_gpus_of_a_container_count_by_their_files_and_those_whose_id_is_known_by_that(amd: Rig) -> None:
    gpus = amd.stock.distances.gpus
    slots = tuple(slot(n) for n in range(3))
    amd.grant(POD, *slots)
    given = [
        DeviceAssignment("rdma/vf", slots),
        DeviceAssignment(GAUDI, ("A", "B")),
        DeviceAssignment(AMD_GPU, gpus[1:2]),
    ]
    amd.pods[POD] = PodDevices(POD, (ContainerDevices("worker", tuple(given)),))
    files = {GAUDI: answer("/dev/dri/card7", "/dev/dri/card4"), AMD_GPU: answer("/dev/dri/card0")}
    listed = [
        {"PodUID": POD.uid, "ContainerName": "worker", "ResourceName": name, "DeviceIDs": {}, "AllocResp": files[name]}
        for name in files
    ]
    (amd.folder / FILE).parent.mkdir()
    (amd.folder / FILE).write_text(json.dumps({"Data": {"PodDeviceEntries": listed}}))
    distances = amd.stock.distances
    bound = amd.bind(call("c1")).values()
    beside = {n for vf in bound for n, gpu in enumerate(gpus) if distances.distance(gpu, vf) is Locality.PXB}
    assert beside == {1, 4, 7}
