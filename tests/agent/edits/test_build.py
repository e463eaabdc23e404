from __future__ import annotations

from dataclasses import replace

import pytest

from agent.config import RailNic, Resource
from agent.edits.build import GpuFiles, build, pcidevice_name
from agent.edits.container_edits import ContainerEdits
from agent.errors import UnitUnhealthy
from agent.model.device import Snapshot
from agent.model.mounts import Mount
from agent.offer.offer import Unit
from agent.offer.units import list_units
from deviceplugin.server import edits_message
from tests.deviceplugin.machines import change, gpu_uuid, node, rdma

HCA = Resource("rdma/hca", "hca", shares=2)
VF = Resource("rdma/vf-pool", "vf")
GPU = Resource("nvidia.com/gpu", "gpu")
NOTHING = GpuFiles()
MOUNTS = (Mount("/opt/cray", "/opt/cray"), Mount("/usr/lib64/libcxi.so.1", "/usr/local/lib/libcxi.so.1"))


def some(resource: Resource, snapshot: Snapshot, *picks: int) -> list[Unit]:
    units = list_units([resource], snapshot)[resource.name]
    return [units[i] for i in picks]


def paths(grants: ContainerEdits) -> list[str]:
    return [d.path for d in grants.devices]


def test_a_share_gets_its_own_hca_and_no_other() -> None:
    snapshot = node(rails=2)
    grants = build(HCA, some(HCA, snapshot, 2), snapshot, NOTHING)
    assert paths(grants) == ["/dev/infiniband/uverbs1", "/dev/infiniband/rdma_cm"]
    assert {d.permissions for d in grants.devices} == {"rw"}
    assert grants.envs == ()


def test_two_shares_of_one_hca_bring_its_devices_once() -> None:
    snapshot = node(rails=2)
    assert paths(build(HCA, some(HCA, snapshot, 0, 1), snapshot, NOTHING)) == [
        "/dev/infiniband/uverbs0",
        "/dev/infiniband/rdma_cm",
    ]


def test_management_adds_umad_and_issm() -> None:
    snapshot = node(rails=1)
    grants = build(replace(HCA, management=True), some(HCA, snapshot, 0), snapshot, NOTHING)
    assert paths(grants) == [f"/dev/infiniband/{n}" for n in ("uverbs0", "umad0", "issm0", "rdma_cm")]


def test_a_node_without_rdma_cm_hands_out_none() -> None:
    snapshot = replace(node(rails=1), rdma_cm=False)
    assert paths(build(HCA, some(HCA, snapshot, 0), snapshot, NOTHING)) == ["/dev/infiniband/uverbs0"]


def test_vfs_are_told_in_the_well_known_variable() -> None:
    snapshot = node(rails=1)
    grants = build(VF, some(VF, snapshot, 0, 2), snapshot, NOTHING)
    assert grants.envs == (("PCIDEVICE_RDMA_VF_POOL", "0000:12:00.1,0000:12:00.3"),)
    assert grants.devices == ()


def test_a_vf_brings_its_own_rdma_device() -> None:
    snapshot = change(node(rails=1), "0000:12:00.1", rdma_devices=(rdma(7, "7:7:7:7"),))
    grants = build(VF, some(VF, snapshot, 0), snapshot, NOTHING)
    assert paths(grants) == ["/dev/infiniband/uverbs7", "/dev/infiniband/rdma_cm"]


@pytest.mark.parametrize("driver", ["vfio-pci", "mlx5_vfio_pci"])
def test_a_vf_bound_to_vfio_brings_its_iommu_group(driver: str) -> None:
    snapshot = change(node(rails=1), "0000:12:00.1", driver=driver, iommu_group=42, netdevs=())
    grants = build(VF, some(VF, snapshot, 0), snapshot, NOTHING)
    assert paths(grants) == ["/dev/vfio/vfio", "/dev/vfio/42"]


def test_an_accelerator_is_told_by_its_address_beside_its_iommu_group() -> None:
    snapshot = change(
        node(rails=1), "0000:12:00.1", pci_class=0x120000, driver="vfio-pci", iommu_group=42, netdevs=(), physfn=None
    )
    fpga = Resource("example.com/fpga", "accelerator")
    grants = build(fpga, some(fpga, snapshot, 0), snapshot, NOTHING)
    assert paths(grants) == ["/dev/vfio/vfio", "/dev/vfio/42"]
    assert grants.envs == (("PCIDEVICE_EXAMPLE_COM_FPGA", "0000:12:00.1"),)


def test_a_vf_bound_to_vfio_without_iommu_is_unhealthy_and_refused_with_the_remedy() -> None:
    snapshot = change(node(rails=1), "0000:12:00.1", driver="vfio-pci", netdevs=())
    units = some(VF, snapshot, 0)
    assert units[0].health.reason == "NoIommuGroup"
    with pytest.raises(UnitUnhealthy, match="enable the IOMMU"):
        build(VF, units, snapshot, NOTHING)


def test_an_hca_without_uverbs_is_refused_with_the_remedy() -> None:
    snapshot = change(
        node(rails=1), "0000:12:00.0", rdma_devices=(replace(rdma(0, "b83f:d203:00a0:0000"), char_devices=()),)
    )
    with pytest.raises(UnitUnhealthy, match="load the module ib_uverbs"):
        build(HCA, some(HCA, snapshot, 0), snapshot, NOTHING)


def test_gpus_are_named_by_cdi_where_the_node_has_their_spec() -> None:
    snapshot = node(rails=2)
    units = some(GPU, snapshot, 0, 1)
    assert build(GPU, units, snapshot, GpuFiles(frozenset({gpu_uuid(0), gpu_uuid(1)}))) == ContainerEdits(
        cdi_devices=(f"nvidia.com/gpu={gpu_uuid(0)}", f"nvidia.com/gpu={gpu_uuid(1)}")
    )
    assert build(GPU, units, snapshot, GpuFiles(frozenset({"all"}))) == ContainerEdits(
        envs=(("NVIDIA_VISIBLE_DEVICES", f"{gpu_uuid(0)},{gpu_uuid(1)}"),)
    )


def test_no_units_bring_nothing() -> None:
    assert build(GPU, [], node(), NOTHING) == ContainerEdits()


def test_the_variable_is_upper_case_without_dots_slashes_and_hyphens() -> None:
    assert pcidevice_name("intel.com/vf-rdma_1") == "PCIDEVICE_INTEL_COM_VF_RDMA_1"


@pytest.mark.parametrize(
    "resource",
    [
        replace(HCA, mounts=MOUNTS),
        replace(VF, mounts=MOUNTS),
        replace(VF, mounts=MOUNTS, binding="late"),
        Resource("rdma/nic", "nic", mounts=MOUNTS),
        Resource("rdma/rail", "rail", nic=RailNic("hca"), mounts=MOUNTS),
    ],
    ids=lambda resource: f"{resource.kind} {resource.binding}",
)
def test_a_container_gets_the_mounts_of_its_resource_once_and_read_only(resource: Resource) -> None:
    snapshot = node(rails=2, vfs=0 if resource.kind == "nic" else 4)
    found = build(resource, some(resource, snapshot, 0, 1), snapshot, NOTHING)
    assert found.mounts == MOUNTS
    assert [(m.host_path, m.container_path, m.read_only) for m in edits_message(found).mounts] == [
        ("/opt/cray", "/opt/cray", True),
        ("/usr/lib64/libcxi.so.1", "/usr/local/lib/libcxi.so.1", True),
    ]
