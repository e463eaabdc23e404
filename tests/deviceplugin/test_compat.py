"""Pools of other projects' configurations: what kubelet and containers get of them, over real sockets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from agent.config import Flags, parse
from agent.edits.build import build
from agent.edits.cdi import ContainerEdits
from agent.edits.compat import go_marshal
from agent.errors import UnitUnhealthy
from agent.model.device import CharDevice, RdmaDevice, Snapshot, VdpaDevice
from agent.offer.units import plain_offer
from hack.sim.pods import Container
from proto.deviceplugin.v1beta1 import api_pb2, api_pb2_grpc
from tests.awaiting import until
from tests.deviceplugin.rig import Rig, rig
from tests.node import change, node

VF = "0000:12:00.1"
FILES = ("uverbs4", "umad4", "issm4")


CHARS = tuple(CharDevice(name.rstrip("4"), f"/dev/infiniband/{name}") for name in FILES)
RDMA = (RdmaDevice("mlx5_4", "CA", "", "", (), CHARS),)


def rdma_vf(snapshot: Snapshot) -> Snapshot:
    return change(snapshot, VF, rdma_devices=RDMA)


def sriov(*pools: dict[str, Any], **flags: Any) -> Any:
    return parse(json.dumps({"resourceList": pools}), "x", Flags(**flags)).resources


def shared(*pools: dict[str, Any], **flags: Any) -> Any:
    return parse(json.dumps({"configList": pools}), "x", Flags(**flags)).resources


def granted(resources: Any, snapshot: Snapshot, count: int = 1) -> ContainerEdits:
    (resource,) = resources
    units = plain_offer(resources, snapshot).offered[resource.name]
    return build(resource, units[:count], snapshot)


def files(found: ContainerEdits) -> list[tuple[str, str]]:
    return [(node.path, node.permissions) for node in found.devices]


async def allocate(r: Rig, resource: str, *ids: str) -> api_pb2.ContainerAllocateResponse:
    """Ask as kubelet does."""
    request = api_pb2.AllocateRequest(container_requests=[api_pb2.ContainerAllocateRequest(devices_ids=ids)])
    async with grpc.aio.insecure_channel(f"unix:{r.plugins.folder / r.socket(resource)}") as channel:
        return (await api_pb2_grpc.DevicePluginStub(channel).Allocate(request)).container_responses[0]


async def test_a_container_gets_what_the_sriov_plugin_gives(short_folder: Path) -> None:
    pool = {"resourceName": "vf_rdma", "selectors": {"pfNames": ["rail0"], "isRdma": True}}
    async with rig(short_folder, snapshot=rdma_vf(node(rails=1)), resources=sriov(pool)) as r:
        answer = await allocate(r, "intel.com/vf_rdma", VF)
        info = (
            '{"0000:12:00.1":{"generic":{"deviceID":"0000:12:00.1"},"rdma":{"issm":"/dev/infiniband/issm4",'
            '"rdma_cm":"/dev/infiniband/rdma_cm","rdma_dev":"mlx5_4","umad":"/dev/infiniband/umad4",'
            '"uverbs":"/dev/infiniband/uverbs4"}}}'
        )
        assert dict(answer.envs) == {
            "PCIDEVICE_INTEL_COM_VF_RDMA": VF,
            "PCIDEVICE_INTEL_COM_VF_RDMA_INFO": info,
        }
        assert [(d.container_path, d.host_path, d.permissions) for d in answer.devices] == [
            (f"/dev/infiniband/{name}", f"/dev/infiniband/{name}", "rw")
            for name in ("issm4", "umad4", "uverbs4", "rdma_cm")
        ]
        assert not answer.annotations
        assert [hold.key for hold in r.ledger.holds()] == [VF]


async def test_with_cdi_a_container_gets_an_annotation_in_place_of_files(short_folder: Path) -> None:
    pool = {"resourceName": "vf_rdma", "selectors": {"pfNames": ["rail0"], "isRdma": True}}
    resources = sriov(pool, use_cdi=True)
    async with rig(short_folder, snapshot=rdma_vf(node(rails=1)), resources=resources) as r:
        answer = await allocate(r, "intel.com/vf_rdma", VF)
        assert dict(answer.annotations) == {"cdi.k8s.io/intel.com_net-pci": f"intel.com/net-pci={VF}"}
        assert [device.name for device in answer.cdi_devices] == [f"intel.com/net-pci={VF}"]
        assert not answer.devices
        assert "PCIDEVICE_INTEL_COM_VF_RDMA_INFO" in answer.envs
        (spec,) = [json.loads(path.read_text()) for path in (short_folder / "cdi").iterdir()]
        assert (spec["cdiVersion"], spec["kind"]) == ("0.5.0", "intel.com/net-pci")
        (device,) = spec["devices"]
        assert device["name"] == VF
        assert [node["path"] for node in device["containerEdits"]["deviceNodes"]] == [
            f"/dev/infiniband/{name}" for name in ("issm4", "umad4", "uverbs4", "rdma_cm")
        ]


def test_the_selector_that_took_a_device_decides_what_comes_with_it() -> None:
    selectors = [{"rootDevices": ["0000:12:00.0#0"], "isRdma": True}, {"vendors": ["15b3"], "needVhostNet": True}]
    snapshot = replace(rdma_vf(node(rails=1, vfs=2)), vhost_net=True)
    found = granted(sriov({"resourceName": "vf", "selectors": selectors}), snapshot, 2)
    info = json.loads(dict(found.envs)["PCIDEVICE_INTEL_COM_VF_INFO"])
    assert set(info[VF]) == {"generic", "rdma"}
    assert info["0000:12:00.2"]["vhost"] == {"net-mount": "/dev/vhost-net", "tun-mount": "/dev/net/tun"}
    assert [path for path, _ in files(found)][-2:] == ["/dev/vhost-net", "/dev/net/tun"]


@pytest.mark.parametrize(
    ("selectors", "changes", "provider", "expected"),
    [
        ({}, {"rdma_devices": RDMA}, {}, []),  # only a pool that asks for RDMA gets its files
        (
            {},
            {"driver": "vfio-pci", "iommu_group": 42},
            {"vfio": {"mount": "/dev/vfio/vfio", "dev-mount": "/dev/vfio/42"}},
            [("/dev/vfio/vfio", ""), ("/dev/vfio/42", "")],
        ),
        (
            {},
            {"driver": "vfio-pci", "iommu_group": 42, "noiommu": True},
            {"vfio": {"mount": "/dev/vfio/vfio", "dev-mount": "/dev/vfio/42"}},
            [("/dev/vfio/vfio", ""), ("/dev/vfio/42", "/dev/vfio/noiommu-42")],
        ),
        ({}, {"driver": "igb_uio", "uio": "uio7"}, {"uio": {"mount": "/dev/uio7"}}, [("/dev/uio7", "")]),
        (
            {"vdpaType": "vhost"},
            {"vdpa": VdpaDevice("vdpa0", "vhost_vdpa", "/dev/vhost-vdpa-0")},
            {"vdpa": {"mount": "/dev/vhost-vdpa-0"}},
            [("/dev/vhost-vdpa-0", "")],
        ),
    ],
)
def test_the_driver_decides_what_comes_with_a_device(
    selectors: dict[str, Any], changes: dict[str, Any], provider: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    pool = {"resourceName": "dpdk", "selectors": {"pfNames": ["rail0"], **selectors}}
    found = granted(sriov(pool), change(node(rails=1, vfs=1), VF, **changes))
    info = json.loads(dict(found.envs)["PCIDEVICE_INTEL_COM_DPDK_INFO"])
    assert info[VF] == {"generic": {"deviceID": VF}, **provider}
    assert [(node.path, node.host_path) for node in found.devices] == expected


def test_a_vfio_device_without_an_iommu_group_is_refused() -> None:
    pool = {"resourceName": "dpdk", "selectors": {"pfNames": ["rail0"]}}
    with pytest.raises(UnitUnhealthy, match="no IOMMU group"):
        granted(sriov(pool), change(node(rails=1, vfs=1), VF, driver="vfio-pci"))


def test_additional_facts_are_told_those_of_the_device_before_those_of_all() -> None:
    information = {"*": {"a": "1", "b": "<2>"}, VF: {"b": "3"}}
    found = granted(
        sriov({"resourceName": "vf", "selectors": {"pfNames": ["rail0"]}, "additionalInfo": information}),
        node(rails=1),
        2,
    )
    info = json.loads(dict(found.envs)["PCIDEVICE_INTEL_COM_VF_INFO"])
    assert info[VF]["extra"] == {"a": "1", "b": "3"}
    assert info["0000:12:00.2"]["extra"] == {"a": "1", "b": "<2>"}
    assert "\\u003c2\\u003e" in dict(found.envs)["PCIDEVICE_INTEL_COM_VF_INFO"]


def test_a_name_with_hyphens_has_a_second_variable_that_shells_can_read() -> None:
    found = granted(sriov({"resourceName": "vf-a", "selectors": {"pfNames": ["rail0"]}}), node(rails=1))
    assert [name for name, _ in found.envs] == [
        "PCIDEVICE_INTEL_COM_VF-A",
        "PCIDEVICE_INTEL_COM_VF-A_INFO",
        "PCIDEVICE_INTEL_COM_VF_A",
        "PCIDEVICE_INTEL_COM_VF_A_INFO",
    ]


def test_json_is_written_as_go_writes_it() -> None:
    assert go_marshal({"b": {"ü": "<&>\u2028"}, "a": {}}) == '{"a":{},"b":{"ü":"\\u003c\\u0026\\u003e\\u2028"}}'


def test_a_pool_may_hide_numa_nodes() -> None:
    pool = {"resourceName": "vf", "excludeTopology": True, "selectors": {"pfNames": ["rail0"]}}
    units = plain_offer(sriov(pool), node(rails=1)).offered["intel.com/vf"]
    assert {unit.numa_node for unit in units} == {-1}


async def test_shared_pools_count_to_their_number_whatever_their_adapters(short_folder: Path) -> None:
    pools = (
        {"resourceName": "a", "rdmaHcaMax": 3, "selectors": {"vendors": ["15b3"]}},
        {"resourceName": "b", "rdmaHcaMax": 5, "selectors": {"ifNames": ["rail1"]}},
        {"resourceName": "c", "rdmaHcaMax": 7, "selectors": {"vendors": ["8086"]}},
    )
    async with rig(short_folder, snapshot=node(rails=2, vfs=0), resources=shared(*pools)) as r:
        assert r.allocatable() == {"rdma/a": 3, "rdma/b": 5, "rdma/c": 0}
        listed = {name: [unit.unit_id for unit in units] for name, units in r.units.items()}
        assert listed["rdma/a"] == ["0", "1", "2"]
        for name, hcas in (("rdma/a", (0, 1)), ("rdma/b", (1,))):
            answer = await allocate(r, name, "2")
            paths = [f"/dev/infiniband/{kind}{hca}" for hca in hcas for kind in ("issm", "umad", "uverbs")]
            assert [d.container_path for d in answer.devices] == [*paths, "/dev/infiniband/rdma_cm"]
            assert {d.permissions for d in answer.devices} == {"rwm"}
            assert not answer.envs
        pod = await r.run_pod("p", Container("main", (("rdma/a", 1), ("rdma/b", 1))))
        assert pod["phase"] == "Running"
        assert r.ledger.holds() == ()
        with pytest.raises(grpc.aio.AioRpcError, match="4 is not among the 3 units"):
            await allocate(r, "rdma/a", "4")


async def test_a_shared_pool_is_ill_only_if_all_its_adapters_are(short_folder: Path) -> None:
    pool = {"resourceName": "a", "rdmaHcaMax": 3, "selectors": {"vendors": ["15b3"]}}
    snapshot = node(rails=2, vfs=0)
    async with rig(short_folder, snapshot=snapshot, resources=shared(pool)) as r:
        pf = snapshot.by_address["0000:12:00.0"]
        bare = replace(pf.rdma_devices[0], char_devices=())
        snapshot = change(snapshot, "0000:12:00.0", rdma_devices=(bare,))
        r.publish(snapshot)
        await until(lambda: r.plugins.allocator.offer.value.snapshot.generation == 2)
        assert r.allocatable() == {"rdma/a": 3}
        r.publish(replace(snapshot, rdma_exclusive=True))
        await until(lambda: r.allocatable() == {"rdma/a": 0})
        assert {unit.health.reason for unit in r.units["rdma/a"]} <= {"NoCharDevice", "ExclusiveRdma"}


def test_with_cdi_a_shared_pool_names_its_adapters() -> None:
    pool = {"resourceName": "a", "rdmaHcaMax": 3, "selectors": {"vendors": ["15b3"]}}
    found = granted(shared(pool, use_cdi=True), node(rails=2, vfs=0))
    names = "nvidia.com/net-rdma=0000:12:00.0,nvidia.com/net-rdma=0000:22:00.0"
    assert found.annotations == (("cdi.k8s.io/nvidia.com_net-rdma", names),)
    assert (found.devices, found.envs) == ((), ())


def test_by_adapter_a_unit_is_a_share_of_one() -> None:
    pool = {"resourceName": "a", "rdmaHcaMax": 2, "allocation": "one-hca", "selectors": {"vendors": ["15b3"]}}
    resources = shared(pool)
    units = plain_offer(resources, node(rails=2, vfs=0)).offered["rdma/a"]
    assert [(unit.device, unit.numa_node) for unit in units] == [("0000:12:00.0", 0)] * 2 + [("0000:22:00.0", 1)] * 2
    found = build(resources[0], units[2:3], node(rails=2, vfs=0))
    assert [path for path, _ in files(found)] == [
        "/dev/infiniband/uverbs1",
        "/dev/infiniband/umad1",
        "/dev/infiniband/issm1",
        "/dev/infiniband/rdma_cm",
    ]
