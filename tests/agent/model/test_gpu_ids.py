"""Device IDs of GPU plugins: every form that is in use, and nothing taken for a GPU that is none."""

from __future__ import annotations

import pytest

from agent.model.device import Gpu, MigDevice, Snapshot
from agent.model.gpu_ids import GpuIds
from agent.placement import Distances

A, B = "GPU-5c3a9f60-0000-4b4b-8c8c-000000000000", "GPU-5c3a9f60-1111-4b4b-8c8c-000000000001"
SLICE = "MIG-7d1c4d3e-7f3d-5a2b-9c11-1a2b3c4d5e6f"
GPUS = (
    Gpu(B, 1, 1, "0000:2b:00.0", "H100", 80 << 30),
    Gpu(A, 0, 0, "0000:1b:00.0", "H100", 80 << 30, mig_devices=(MigDevice(SLICE, "1g.10gb", 7, 0, 10 << 30),)),
)
OTHERS = (
    Gpu("0000:c1:00.0", 0, None, "0000:c1:00.0", "AMD", 0, names=("card0", "renderD128", "amdgpu_xcp_3")),
    Gpu("0000:c2:00.0", 1, None, "0000:c2:00.0", "Intel", 0, names=("card1",)),
    Gpu("0000:c3:00.0", 2, None, "0000:c3:00.0", "Huawei", 0, names=("davinci5",)),
    Gpu("0000:c4:00.0", 3, None, "0000:c4:00.0", "Else", 0, names=("accel7",)),
)
AMD, INTEL, HUAWEI, ELSE = (gpu.pci_address for gpu in OTHERS)
IDS = (
    GpuIds("else.example/*", r"else-(?P<bus>[0-9a-f]{2})", "0000:{bus}:00.0"),
    GpuIds("number.example/npu", r"(?P<n>[0-9]+)", "accel{n}"),
    GpuIds("address.example/npu", r".*_(?P<pci>[0-9A-F:.]+)"),
    GpuIds("habana.ai/gaudi", r"(?P<pci>[0-9a-f:.]+)"),
)
DISTANCES = Distances(Snapshot(gpus=GPUS, accelerators=OTHERS, gpu_ids=IDS))


@pytest.mark.parametrize(
    ("name", "unit_id", "gpu"),
    [
        ("nvidia.com/gpu", B, B),
        ("nvidia.com/gpu", f"{B}::3", B),
        ("nvidia.com/gpu.shared", f"{B}::0", B),
        ("nvidia.com/gpu", "1", B),
        ("nvidia.com/gpu", "0::12", A),
        ("nvidia.com/mig-1g.10gb", SLICE, A),
        ("nvidia.com/mig-1g.10gb", f"{SLICE}::1", A),
        ("nvidia.com/mig-1g.10gb", "0:1", A),
        ("nvidia.com/gpu", "0:1::2", A),
        ("nvidia.com/mig-1g.10gb", f"MIG-{A}/7/0", A),
        ("amd.com/gpu", "0000:2b:00.0", B),
        ("vendor.com/renamed", B, B),
        ("rdma/rail", f"rail-{A}", A),
        ("ours.example/h100", "1", B),
        ("amd.com/gpu", "0000:c1:00.0", AMD),
        ("amd.com/gpu", "0000:c1:00.0-slice-1", AMD),
        ("amd.com/cpx_nps1", "amdgpu_xcp_3", AMD),
        ("gpu.intel.com/i915", "card1-0", INTEL),
        ("gpu.intel.com/xe", "card1-12", INTEL),
        ("huawei.com/Ascend910", "Ascend910-5", HUAWEI),
        ("huawei.com/Ascend910-4c", "Ascend910-4c-100-5", HUAWEI),
        ("huawei.com/npu", "npu-5", HUAWEI),
        ("else.example/accelerator", "else-c4", ELSE),
        ("number.example/npu", "7", ELSE),
        ("address.example/npu", "slot_C4:00.0", ELSE),
    ],
)
def test_an_id_names_its_gpu(name: str, unit_id: str, gpu: str) -> None:
    assert DISTANCES.gpus_of([(name, unit_id)], {"ours.example/h100"}) == (gpu,)


@pytest.mark.parametrize(
    ("name", "unit_id"),
    [
        ("rdma/vf", "1"),
        ("rdma/vf", "0000:2b:00.0"),
        ("rdma/hca", "hca-0c42a10300651234-1"),
        ("rdma/late", "slot-rdma:late-0-1"),
        ("nvidia.com/gpu", "9"),
        ("nvidia.com/gpu", "GPU-of-another-node"),
        ("nvidia.com/gpu", ""),
        ("nvidia.com/mig-1g.10gb", "MIG-unknown"),
        ("gpu.intel.com/i915_monitoring", "all"),
        ("gpu.intel.com/i915", "card9-0"),
        ("habana.ai/gaudi", "AN24001234"),
        ("else.example/accelerator", "else-c4-1"),
        ("address.example/npu", "x" * 128 + "_C4:00.0"),
    ],
)
def test_an_id_that_names_no_gpu_of_this_node_counts_for_nothing(name: str, unit_id: str) -> None:
    assert DISTANCES.gpus_of([(name, unit_id)]) == ()


def test_a_gpu_whose_id_says_nothing_is_somewhere_on_its_numa_node() -> None:
    gaudi, disk = ("habana.ai/gaudi", "AN24001234"), ("example.com/disk", "sda")
    told = {gaudi: 1, disk: 0, ("nvidia.com/gpu", "0"): 1}
    found = DISTANCES.gpus_of([gaudi, ("habana.ai/gaudi", "AN24009999"), disk, ("nvidia.com/gpu", "0")], (), told)
    assert found == (A, "numa:1"), "a known one is where it is, and what is no GPU's draws nothing near"
