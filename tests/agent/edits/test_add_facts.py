"""What joins a container's edits when its devices are in the pod."""

from __future__ import annotations

from typing import Any

import pytest

from agent.config import ENVIRONMENTS
from agent.edits.add_facts import AddedEdits, Nic, RdmaFacts, added_edits, wants_facts
from agent.edits.build import helper_variables
from agent.model.allocation import NetworkData
from tests.deviceplugin.machines import rdma

FILES = {"NODEFABRIC_RAILS": "/run/cdi/a.rails", "NCCL_TOPO_FILE": "/run/cdi/a.nccl"}


def nic(number: int, index: int | None, *, is_roce: bool = True) -> Nic:
    facts = RdmaFacts(f"mlx5_{number}", is_roce, 1, index, "10.0.0.1")
    return Nic(f"0000:0{number}:00.0", "rdma/vf", NetworkData("net1"), facts)


def edits(*numbers: int, words: tuple[str, ...] = ENVIRONMENTS) -> dict[str, Any]:
    devices = [rdma(number, "0000:0000:0000:0001") for number in numbers]
    return {"env": [f"{name}={value}" for name, value in helper_variables(words, devices)], "deviceNodes": [{}]}


def env(said: AddedEdits) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in said.edits.get("env", ()))


def test_each_library_is_told_the_index_that_all_of_its_devices_have() -> None:
    said = added_edits(edits(1, 2), [nic(1, 5), nic(2, 5), nic(3, 7)], "eth0", FILES)
    assert said.left_out == ()
    assert env(said) == {
        "NCCL_IB_GID_INDEX": "5",
        "UCX_IB_GID_INDEX": "5",
        "NVSHMEM_IB_GID_INDEX": "5",
        "MV2_DEFAULT_GID_INDEX": "5",
        "NCCL_SOCKET_IFNAME": "=eth0",
    }
    assert [(mount["hostPath"], mount["containerPath"]) for mount in said.edits["mounts"]] == [
        ("/run/cdi/a.rails", "/run/nodefabric/rails.json"),
        ("/run/cdi/a.nccl", "/run/nodefabric/nccl-topology.xml"),
    ]
    assert all("ro" in mount["options"] for mount in said.edits["mounts"])


def test_it_stands_beside_the_edits_in_place_of_what_was_told_before() -> None:
    bare = edits(1)
    first = added_edits(bare, [nic(1, 3)], "eth0", FILES)
    once = first.applied_to(bare)
    assert once == {**bare, "env": [*bare["env"], *first.edits["env"]], "mounts": first.edits["mounts"]}
    assert added_edits(once, [nic(1, 3)], "eth0", FILES) == first
    assert first.applied_to(once) == once
    assert added_edits(once, []).applied_to(once) == bare


@pytest.mark.parametrize(
    ("nics", "why"),
    [
        ([nic(1, 3), nic(2, 5)], "it differs (mlx5_1: 3; mlx5_2: 5)"),
        ([nic(1, 3), nic(1, 5), nic(2, 3)], "it differs (mlx5_1: 3, 5; mlx5_2: 3)"),
        ([nic(1, 3), nic(2, None)], "mlx5_2 has no RoCE v2 GID that is known to be the pod's"),
        ([nic(1, 3)], "mlx5_2 has no RoCE v2 GID that is known to be the pod's"),
    ],
)
def test_where_no_index_is_right_for_all_it_is_left_out_and_said_why(nics: list[Nic], why: str) -> None:
    said = added_edits(edits(1, 2, words=("nccl",)), nics, "eth0")
    assert said.left_out == (f"NCCL_IB_GID_INDEX is left out, for the library to choose: {why}",)
    assert env(said) == {"NCCL_SOCKET_IFNAME": "=eth0"}


def test_infiniband_is_told_no_index_and_nothing_is_missing_there() -> None:
    both = edits(1, 2, words=("ucx",))
    assert added_edits(both, [nic(1, None, is_roce=False), nic(2, None, is_roce=False)]) == AddedEdits({})
    assert env(added_edits(both, [nic(1, None, is_roce=False), nic(2, 3)]))["UCX_IB_GID_INDEX"] == "3"


def test_only_who_asked_for_something_is_told() -> None:
    assert not wants_facts({"env": ["PCIDEVICE_RDMA_VF=0000:01:00.0"]})
    assert not wants_facts({})
    assert all(wants_facts(edits(1, words=(word,))) for word in ENVIRONMENTS)
