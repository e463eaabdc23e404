"""What joins a container's edits when its devices are in the pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from agent.config import ENVIRONMENTS
from agent.edits.add_facts import (
    Nic,
    NodeFacts,
    RdmaFacts,
    added_edits,
    nccl_topology,
    paired,
    rails_document,
    wants_facts,
)
from agent.edits.build import helper_variables
from agent.hardware.lldp import Neighbour
from agent.model.allocation import NetworkData, Spec
from agent.model.device import NumaNode, Snapshot
from agent.placement import Distances
from tests.deviceplugin.dra.nodes import recorded_node
from tests.node import gpu_uuid, node, rdma

FILES = {"NODEFABRIC_RAILS": "/run/cdi/a.rails", "NCCL_TOPO_FILE": "/run/cdi/a.nccl"}


def nic(number: int, index: int | None, *, is_roce: bool = True) -> Nic:
    facts = RdmaFacts(f"mlx5_{number}", is_roce, 1, index, "10.0.0.1")
    return Nic(f"0000:0{number}:00.0", "rdma/vf", NetworkData("net1"), facts)


def edits(*numbers: int, words: tuple[str, ...] = ENVIRONMENTS) -> dict[str, Any]:
    devices = [rdma(number, "0000:0000:0000:0001") for number in numbers]
    return {"env": [f"{name}={value}" for name, value in helper_variables(words, devices)], "deviceNodes": [{}]}


def env(said: tuple[Mapping[str, Any], list[str]]) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in said[0].get("env", ()))


def test_each_library_is_told_the_index_that_all_of_its_devices_have() -> None:
    said = added_edits(edits(1, 2), [nic(1, 5), nic(2, 5), nic(3, 7)], "eth0", FILES)
    assert said[1] == []
    assert env(said) == {
        "NCCL_IB_GID_INDEX": "5",
        "UCX_IB_GID_INDEX": "5",
        "NVSHMEM_IB_GID_INDEX": "5",
        "MV2_DEFAULT_GID_INDEX": "5",
        "NCCL_SOCKET_IFNAME": "=eth0",
    }
    assert [(mount["hostPath"], mount["containerPath"]) for mount in said[0]["mounts"]] == [
        ("/run/cdi/a.rails", "/run/nodefabric/rails.json"),
        ("/run/cdi/a.nccl", "/run/nodefabric/nccl-topology.xml"),
    ]
    assert all("ro" in mount["options"] for mount in said[0]["mounts"])


def test_it_stands_beside_the_edits_in_place_of_what_was_told_before() -> None:
    bare = Spec("vf", edits(1))
    first = added_edits(bare.edits, [nic(1, 3)], "eth0", FILES)[0]
    once = bare.with_added(first)
    assert once.whole == {**bare.edits, "env": [*bare.edits["env"], *first["env"]], "mounts": first["mounts"]}
    assert once.with_added(first) == once
    assert once.with_added({}) == bare
    assert bare.whole == bare.edits


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
    assert said[1] == [f"NCCL_IB_GID_INDEX is left out, for the library to choose: {why}"]
    assert env(said) == {"NCCL_SOCKET_IFNAME": "=eth0"}


def test_infiniband_is_told_no_index_and_nothing_is_missing_there() -> None:
    both = edits(1, 2, words=("ucx",))
    assert added_edits(both, [nic(1, None, is_roce=False), nic(2, None, is_roce=False)]) == ({}, [])
    assert env(added_edits(both, [nic(1, None, is_roce=False), nic(2, 3)]))["UCX_IB_GID_INDEX"] == "3"


def test_only_who_asked_for_something_is_told() -> None:
    assert not wants_facts({"env": ["PCIDEVICE_RDMA_VF=0000:01:00.0"]})
    assert not wants_facts({})
    assert all(wants_facts(edits(1, words=(word,))) for word in ENVIRONMENTS)


SNAPSHOT: Snapshot = replace(
    node(rails=4, vfs=2),
    numa_nodes=tuple(
        NumaNode(n, tuple(range(n * 32, n * 32 + 32)), 0, (), (10, 21) if n == 0 else (21, 10)) for n in (0, 1)
    ),
)
PFS = [device.address for device in SNAPSHOT.devices if device.vfs]
PLACE = NodeFacts(
    SNAPSHOT,
    Distances(SNAPSHOT),
    {pf: number for number, pf in enumerate(PFS)},
    {PFS[2]: Neighbour("00:11:22:33:44:55", "Ethernet1/7", "leaf-3")},
    dict.fromkeys(PFS, 0),
)


def nic_in_pod(rail: int, vf: int = 0) -> Nic:
    network = NetworkData(f"net{rail}", "02:00:00:00:00:01", (f"10.{rail}.0.5/16",))
    device = SNAPSHOT.by_address[PFS[rail]].vfs[vf]
    return Nic(device, "rdma/vf", network, RdmaFacts(f"mlx5_{10 + rail}", True, 1, 3, f"10.{rail}.0.5"))


def test_a_rail_is_a_nic_with_the_gpu_beside_it_and_all_that_is_known_of_its_place() -> None:
    nics = [nic_in_pod(2), nic_in_pod(0)]
    first, second = rails_document(paired(nics, [gpu_uuid(0), gpu_uuid(2)], PLACE), PLACE)["rails"]
    assert second == {
        "rail": 2,
        "plane": 0,
        "locality": "PIX",
        "numaNode": 1,
        "cpus": "32-63",
        "rateGbps": 400,
        "leafSwitch": "leaf-3",
        "leafPort": "Ethernet1/7",
        "gpu": {"uuid": gpu_uuid(2), "pciAddress": "0000:34:00.0"},
        "nic": {
            "pciAddress": nics[0].device,
            "pfPciAddress": PFS[2],
            "resource": "rdma/vf",
            "interface": "net2",
            "mac": "02:00:00:00:00:01",
            "addresses": ["10.2.0.5/16"],
            "rdmaDevice": "mlx5_12",
            "rdmaPort": 1,
            "gidIndex": 3,
        },
    }
    assert (first["rail"], first["gpu"]["uuid"], first["leafSwitch"]) == (0, gpu_uuid(0), None)


def pairs(nics: list[Nic], gpus: list[str]) -> list[tuple[int, str, str | None]]:
    found = rails_document(paired(nics, gpus, PLACE), PLACE)["rails"]
    return [(each["rail"], each["gpu"]["uuid"] if each["gpu"] else "", each["locality"]) for each in found]


def test_nics_without_a_gpu_of_their_own_share_the_nearest_and_alike() -> None:
    assert pairs([nic_in_pod(0), nic_in_pod(1)], []) == [(0, "", None), (1, "", None)]
    assert [gpu for _, gpu, _ in pairs([nic_in_pod(1), nic_in_pod(2)], [gpu_uuid(2)])] == [gpu_uuid(2)] * 2
    assert pairs([nic_in_pod(0), nic_in_pod(0, 1), nic_in_pod(3)], [gpu_uuid(0), gpu_uuid(3)]) == [
        (0, gpu_uuid(0), "PIX"),
        (0, gpu_uuid(0), "PIX"),
        (3, gpu_uuid(3), "PIX"),
    ]
    assert pairs([nic_in_pod(0), nic_in_pod(0, 1)], [gpu_uuid(2), gpu_uuid(3)]) == [
        (0, gpu_uuid(2), "SYS"),
        (0, gpu_uuid(3), "SYS"),
    ]


def test_what_is_not_known_is_null() -> None:
    bare = Nic("0000:99:00.0", "", NetworkData())
    (rail,) = rails_document(paired([bare], [], PLACE), PLACE)["rails"]
    told: dict[str, Any] = rail | rail.pop("nic")
    assert {key for key, value in told.items() if value is not None} == {"pciAddress", "pfPciAddress", "addresses"}


def test_nccl_finds_gpu_and_nic_below_one_switch_of_their_numa_node() -> None:
    gpus = [gpu_uuid(0), gpu_uuid(2), gpu_uuid(3)]
    system = ElementTree.fromstring(
        nccl_topology(paired([nic_in_pod(0), nic_in_pod(0, 1), nic_in_pod(2)], gpus, PLACE), gpus, PLACE)
    )
    assert (system.tag, system.get("version")) == ("system", "1")
    cpus = system.findall("cpu")
    assert [(cpu.get("numaid"), cpu.get("affinity")) for cpu in cpus] == [("0", "ffffffff"), ("1", "ffffffff,00000000")]
    (switch,) = cpus[0].findall("pci")
    # NCCL takes the functions of an adapter for one, whose address ends with 00.0.
    assert [(each.get("busid"), each.get("class")) for each in switch] == [
        ("0000:14:00.0", "0x030200"),
        ("0000:12:00.0", "0x020000"),
    ]
    beside, alone = cpus[1].findall("pci")
    assert [each.get("busid") for each in beside] == ["0000:34:00.0", "0000:32:00.0"]
    assert (alone.get("busid"), list(alone)) == ("0000:44:00.0", [])


def test_a_gpu_that_only_sysfs_shows_is_told_by_its_address() -> None:
    snapshot = recorded_node("mi250-8gpu")
    place = NodeFacts(snapshot, Distances(snapshot), {}, {})
    vfs = [pf.vfs[0] for pf in snapshot.devices if pf.vfs]
    nics = [Nic(vf, "rdma/vf", NetworkData("", "", ()), None) for vf in vfs[:2]]
    gpus = [gpu.uuid for gpu in snapshot.all_gpus[:4:2]]
    told = [
        (rail["gpu"], rail["nic"]["pciAddress"]) for rail in rails_document(paired(nics, gpus, place), place)["rails"]
    ]
    assert told == [({"uuid": None, "pciAddress": gpu}, vf) for gpu, vf in zip(gpus, vfs, strict=False)]


def test_planes_of_one_rail_follow_each_other() -> None:
    nics = [nic_in_pod(3), nic_in_pod(1), nic_in_pod(2)]
    numbers = {**PLACE.numbers, PFS[3]: 2}
    place = replace(PLACE, numbers=numbers, planes={PFS[1]: 0, PFS[2]: 1, PFS[3]: 0})
    told = rails_document(paired(nics, [], place), place)["rails"]
    assert [(rail["rail"], rail["plane"], rail["nic"]["pciAddress"]) for rail in told] == [
        (1, 0, nics[1].device),
        (2, 0, nics[0].device),
        (2, 1, nics[2].device),
    ]
