from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.config import ENVIRONMENTS, RailNic, Resource, Select, parse_pf
from agent.edits.build import (
    FILES,
    GpuFiles,
    GpuFilesOf,
    build,
    gpu_edits,
    helper_variables,
    variables_of_container,
)
from agent.edits.cdi import ContainerEdits, DeviceNode
from agent.errors import UnitUnhealthy
from agent.model.device import Gpu, MigDevice, Snapshot
from agent.model.health import HEALTHY
from agent.model.mounts import Mount
from agent.offer.offer import Unit
from agent.offer.units import plain_offer
from deviceplugin.server import edits_message
from hack.sim.pods import Container
from tests.deviceplugin.rig import rig
from tests.node import change, node, rdma

HCA = Resource("rdma/hca", "hca", shares=2)
VF = Resource("rdma/vf-pool", "vf")
GPU = Resource("nvidia.com/gpu", "gpu")
NOTHING = GpuFiles()
MOUNTS = (Mount("/opt/cray", "/opt/cray"), Mount("/usr/lib64/libcxi.so.1", "/usr/local/lib/libcxi.so.1"))


def some(resource: Resource, snapshot: Snapshot, *picks: int) -> list[Unit]:
    units = plain_offer([resource], snapshot).offered[resource.name]
    return [units[i] for i in picks]


def paths(grants: ContainerEdits) -> list[str]:
    return [d.path for d in grants.devices]


VFIO = {"iommu_group": 42, "netdevs": ()}


@pytest.mark.parametrize(
    ("resource", "picks", "changes", "expected"),
    [
        (HCA, [2], {}, ["infiniband/uverbs1", "infiniband/rdma_cm"]),
        (HCA, [0, 1], {}, ["infiniband/uverbs0", "infiniband/rdma_cm"]),
        (
            replace(HCA, management=True),
            [0],
            {},
            [f"infiniband/{name}" for name in ("uverbs0", "umad0", "issm0", "rdma_cm")],
        ),
        (VF, [0], {"driver": "vfio-pci", **VFIO}, ["vfio/vfio", "vfio/42"]),
        (VF, [0], {"driver": "mlx5_vfio_pci", **VFIO}, ["vfio/vfio", "vfio/42"]),
    ],
)
def test_a_container_gets_the_files_of_its_own_devices_and_no_other(
    resource: Resource, picks: list[int], changes: dict[str, object], expected: list[str]
) -> None:
    snapshot = change(node(rails=2), "0000:12:00.1", **changes)
    found = build(resource, some(resource, snapshot, *picks), snapshot, NOTHING)
    assert [(file.path, file.permissions) for file in found.devices] == [(f"/dev/{name}", "rw") for name in expected]


def test_a_node_without_rdma_cm_hands_out_none() -> None:
    snapshot = replace(node(rails=1), rdma_cm=False)
    assert paths(build(HCA, some(HCA, snapshot, 0), snapshot, NOTHING)) == ["/dev/infiniband/uverbs0"]


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


HCAS = [device.rdma_devices[0] for device in node(rails=2, vfs=0).devices if device.rdma_devices]


def hca(name: str, *words: str, pf: str = "rail0", binding: str = "early") -> Resource:
    return Resource(name, "hca", Select(pf=(parse_pf(pf),)), shares=2, environment=words, binding=binding)


def test_each_word_stands_for_its_variables() -> None:
    assert dict(helper_variables(ENVIRONMENTS, HCAS)) == {
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1",
        "NVSHMEM_HCA_LIST": "mlx5_0:1,mlx5_1:1",
        "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
        "MV2_IBA_HCA": "mlx5_0:mlx5_1",
        **FILES,
    }


def test_a_container_without_an_rdma_device_gets_none_but_those_of_files() -> None:
    assert dict(helper_variables(ENVIRONMENTS, [])) == FILES


async def test_kubelet_gets_them_with_the_grant(short_folder: Path) -> None:
    resources = (hca("rdma/a", "nccl"), hca("rdma/b", "ucx", pf="rail1"))
    async with rig(short_folder, resources=resources) as r:
        pod = await r.run_pod("p", Container("main", (("rdma/a", 1), ("rdma/b", 1))))
        (container,) = pod["containers"]
        assert container["envs"] == {"NCCL_IB_HCA": "=mlx5_0", "UCX_NET_DEVICES": "mlx5_1:1"}


def test_a_container_with_units_of_several_resources_gets_one_value_for_all() -> None:
    snapshot: Snapshot = node(rails=3, vfs=0)
    resources = [hca(f"rdma/{n}", *words, pf=f"rail{n}") for n, words in enumerate((("nccl",), ("nccl", "ucx"), ()))]
    units = plain_offer(resources, snapshot).offered
    held = [(resource, units[resource.name][:1]) for resource in resources]
    assert dict(variables_of_container(held, snapshot)) == {
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        "UCX_NET_DEVICES": "mlx5_1:1",
    }


SLICE = MigDevice("MIG-1", "1g.10gb", gpu_instance=7, compute_instance=1, memory_bytes=1, index=2)
SNAPSHOT = Snapshot(
    gpus=(
        Gpu("GPU-a", 0, 0, "0000:1b:00.0", "H100", 1),
        Gpu("GPU-b", 1, 5, "0000:3d:00.0", "H100", 1, mig_mode=True, mig_devices=(SLICE,)),
    )
)
GPU_FILES = GpuFiles(
    nodes=frozenset({"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia5"}),
    mig_minors={"gpu5/gi7/access": 66, "gpu5/gi7/ci1/access": 68, "gpu0/gi7/access": 3},
)


def asked_by(value: str) -> ContainerEdits:
    return ContainerEdits(envs=(("NVIDIA_VISIBLE_DEVICES", value),))


def named(*names: str) -> ContainerEdits:
    return ContainerEdits(cdi_devices=tuple(f"nvidia.com/gpu={name}" for name in names))


def by_mounts(*gpus: str) -> ContainerEdits:
    folder = "/var/run/nvidia-container-devices"
    return replace(asked_by(folder), mounts=tuple(Mount("/dev/null", f"{folder}/{gpu}") for gpu in gpus))


NODES = ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia5", "nvidia-caps/nvidia-cap66", "nvidia-caps/nvidia-cap68")
OF_BOTH = ContainerEdits(devices=tuple(DeviceNode(f"/dev/{name}") for name in NODES))
BOTH = ("GPU-a", "GPU-b")


@pytest.mark.parametrize(
    ("devices", "by", "names", "expected"),
    [
        # Unasked, a host whose spec names all of the GPUs gets its names, any other the variable.
        (BOTH, (), (), asked_by("GPU-a,GPU-b")),
        (("GPU-a",), (), ("GPU-a", "0", "all"), named("GPU-a")),
        (BOTH, (), ("0", "1", "all"), named("0", "1")),
        (BOTH, (), ("0", "all"), asked_by("GPU-a,GPU-b")),
        (("GPU-a",), (), ("all",), asked_by("GPU-a")),
        (("GPU-a", "GPU-new"), ("cdi",), (), named("GPU-a", "GPU-new")),
        # A slice is named by its UUID, or by the numbers of GPU and slice.
        (("MIG-1",), (), ("MIG-1", "1:2"), named("MIG-1")),
        (("MIG-1",), (), ("1:2",), named("1:2")),
        (BOTH, ("volume-mounts",), (), by_mounts(*BOTH)),
        (("GPU-a", "MIG-1"), ("envvar", "device-specs"), (), asked_by("GPU-a,MIG-1") + OF_BOTH),
        (("GPU-gone",), ("envvar", "device-specs"), (), asked_by("GPU-gone")),
        (("GPU-a",), ("cdi", "envvar", "volume-mounts"), (), named("GPU-a") + by_mounts("GPU-a")),
        # Replicas of one GPU are one device.
        (("GPU-a", "GPU-a"), (), (), asked_by("GPU-a")),
        (("GPU-a", "GPU-a"), ("cdi",), (), named("GPU-a")),
    ],
)
def test_a_container_names_its_gpus_as_the_host_or_the_operator_says(
    devices: tuple[str, ...], by: tuple[str, ...], names: tuple[str, ...], expected: ContainerEdits
) -> None:
    units = [Unit(device, "nvidia.com/gpu", "gpu", device, HEALTHY, 0) for device in devices]
    assert gpu_edits(by, units, SNAPSHOT, replace(GPU_FILES, cdi_names=frozenset(names))) == expected


def test_what_the_host_has_is_read_from_its_root(tmp_path: Path) -> None:
    assert GpuFilesOf(tmp_path).read() == GpuFiles()
    for path in ("dev/nvidia0", "dev/nvidiactl", "dev/null", "etc/cdi/nvidia.yaml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "dev/nvidia-caps").mkdir()
    (tmp_path / "etc/cdi/nvidia.yaml").write_text("kind: nvidia.com/gpu\ndevices:\n- name: '0'\n")
    minors = tmp_path / "proc/driver/nvidia-caps/mig-minors"
    minors.parent.mkdir(parents=True)
    minors.write_text("config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n")
    found = GpuFilesOf(tmp_path).read()
    assert found.cdi_names == {"0"}
    assert found.nodes == {"/dev/nvidia0", "/dev/nvidiactl"}
    assert found.mig_minors["gpu0/gi0/ci0/access"] == 4
