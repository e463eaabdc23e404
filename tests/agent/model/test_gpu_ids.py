"""Device IDs of GPU plugins: every form that is in use, and nothing taken for a GPU that is none."""

from __future__ import annotations

import pytest

from agent.model.device import Gpu, MigDevice, Snapshot
from agent.model.gpu_ids import gpus_of, is_gpu_resource
from agent.placement import Terrain

A, B = "GPU-5c3a9f60-0000-4b4b-8c8c-000000000000", "GPU-5c3a9f60-1111-4b4b-8c8c-000000000001"
SLICE = "MIG-7d1c4d3e-7f3d-5a2b-9c11-1a2b3c4d5e6f"
GPUS = (
    Gpu(B, 1, 1, "0000:2b:00.0", "H100", 80 << 30),
    Gpu(A, 0, 0, "0000:1b:00.0", "H100", 80 << 30, mig_devices=(MigDevice(SLICE, "1g.10gb", 7, 0, 10 << 30),)),
)
FIND = Terrain(Snapshot(gpus=GPUS)).gpu


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
    ],
)
def test_an_id_names_its_gpu(name: str, unit_id: str, gpu: str) -> None:
    assert gpus_of([(name, unit_id)], FIND, {"ours.example/h100"}) == {gpu}


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
    ],
)
def test_an_id_that_names_no_gpu_of_this_node_counts_for_nothing(name: str, unit_id: str) -> None:
    assert gpus_of([(name, unit_id)], FIND) == frozenset()


def test_resources_of_gpus_are_known_by_name() -> None:
    assert all(
        map(is_gpu_resource, ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-2g.20gb", "amd.com/gpu"))
    )
    assert not any(map(is_gpu_resource, ("rdma/vf", "nvidia.com/rdma", "intel.com/sriov_gpu_less", "rdma/gpus")))
