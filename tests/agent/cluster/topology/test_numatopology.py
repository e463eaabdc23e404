from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.cluster.object_watch import WatchedPod
from agent.cluster.topology.node_view import NodeState
from agent.cluster.topology.numatopology import build
from agent.hardware.sysfs.numa import read_cpu_places
from agent.kubelet.kubelet_config import KubeletSettings
from agent.kubelet.podresources import Allocatable, PodDevices
from agent.model.device import CpuPlace, Snapshot
from hack.sim.cluster import definitions
from tests.agent.cluster.topology.nodes import NODE, OBJECTS, in_use, pod_with

(DEFINITION,) = [d for d in definitions.load() if d.kind == "Numatopology"]
STATIC = KubeletSettings("best-effort", cpu_manager="static", reserved_milli_cpu=1500)


def spec(state: NodeState, places: dict[int, CpuPlace] | None = None, *, with_pods: bool = True) -> dict[str, Any]:
    document = build(state, places or {}, with_pods=with_pods)
    assert document is not None
    assert DEFINITION.problems(document) == []
    found: dict[str, Any] = document["spec"]
    return found


OWNING = pod_with(cpus={"c": [2], "d": [5, 6]})


@pytest.mark.parametrize(
    ("pods", "handed_out", "kubelet", "allocatable", "reserved"),
    [
        pytest.param((OWNING,), range(1, 8), STATIC, "1,3-4,7", "0", id="without reserved and owned ones"),
        pytest.param((), (), STATIC, "0-7", "1500m", id="a reservation that names no CPUs is left to the scheduler"),
        pytest.param((), (), replace(STATIC, reserved_cpus=frozenset({0, 4})), "1-3,5-7", "0", id="one that does"),
        pytest.param((OWNING,), (2, 5, 6), STATIC, "", "0", id="a full node still has cpu"),
    ],
)
def test_free_cpus_are_numbers(
    pods: tuple[PodDevices, ...], handed_out: Sequence[int], kubelet: KubeletSettings, allocatable: str, reserved: str
) -> None:
    found = spec(replace(NODE, kubelet=kubelet, pods=pods, allocatable=Allocatable(cpu_ids=tuple(handed_out))))
    assert found["numares"] == {"cpu": {"allocatable": allocatable, "capacity": 8}}
    assert found["resReserved"] == {"cpu": reserved}
    assert found["policies"] == {"CPUManagerPolicy": "static", "TopologyManagerPolicy": "best-effort"}


def test_every_cpu_has_its_place_also_where_the_kernel_does_not_tell() -> None:
    found = spec(NODE, {0: CpuPlace(0, 0), 4: CpuPlace(1, 0)})["cpuDetail"]
    assert len(found) == 8
    assert found["4"] == {"numa": 1, "socket": 1, "core": 0}
    assert found["5"] == {"numa": 1, "socket": 1, "core": 5}


def test_pods_that_own_cpus_are_listed_by_namespace_name_and_uid() -> None:
    pods = (pod_with("b", cpus={"c": [2, 3], "d": [5]}), pod_with("a", cpus={"c": [1]}), pod_with("shared"))
    state = replace(NODE, pods=pods, watched=(WatchedPod("ns", "b", "uid-b", "Running"),))
    found = spec(state)["podAllocations"]
    assert [(pod["name"], pod.get("uid")) for pod in found] == [("a", None), ("b", "uid-b")]
    assert [each["allocations"]["cpu"] for pod in found for each in pod["containerAllocations"]] == ["1", "2-3", "5"]
    assert "podAllocations" not in spec(state, with_pods=False)


def test_without_numa_information_there_is_nothing_to_publish() -> None:
    assert build(NodeState("n", Snapshot(), {}), {}) is None


@pytest.fixture
def two_cores(tmp_path: Path) -> Path:
    for cpu, (socket, core) in {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (-1, 0)}.items():
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{socket}\n")
        (folder / "core_id").write_text(f"{core}\n")
    return tmp_path


def test_socket_and_core_are_read_where_the_kernel_tells_them(two_cores: Path) -> None:
    found = read_cpu_places(two_cores, range(5))
    assert found == {0: CpuPlace(0, 0), 1: CpuPlace(0, 1), 2: CpuPlace(1, 0)}


def test_the_object_of_a_whole_node_is_as_it_was(node_snapshot: Callable[[str], Snapshot]) -> None:
    state = in_use(node_snapshot("h100-8gpu"))
    half = {node.number: len(node.cpus) // 2 for node in state.snapshot.numa_nodes}
    places = {
        cpu: CpuPlace(node.number, rank % half[node.number])
        for node in state.snapshot.numa_nodes
        for rank, cpu in enumerate(node.cpus)
    }
    document = build(state, places)
    assert document is not None
    assert DEFINITION.problems(document) == []
    assert document == json.loads((OBJECTS / "numatopology.json").read_text())
