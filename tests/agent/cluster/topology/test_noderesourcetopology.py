from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from agent.cluster.object_watch import WatchedPod
from agent.cluster.topology.node_view import NodeState
from agent.cluster.topology.noderesourcetopology import build, fingerprint
from agent.cluster.topology.publisher import canonical
from agent.config.topology import Fingerprint
from agent.kubelet.kubelet_config import KubeletSettings
from agent.kubelet.podresources import Allocatable, DeviceAssignment, PodDevices
from agent.model.allocation import PodRef
from agent.model.device import NumaNode, Snapshot
from hack.sim.cluster import definitions
from tests.agent.cluster.topology.nodes import GIB, NODE, OBJECTS, TWO_SOCKETS, in_use, offered, pod_with

(DEFINITION,) = [d for d in definitions.load() if d.kind == "NodeResourceTopology"]
UNITS = {"rdma/vf": (offered("a", 0), offered("b", 0), offered("c", 1))}


def built(state: NodeState, *rule: str) -> dict[str, Any]:
    document = build(state, Fingerprint(*rule))
    assert document is not None
    assert DEFINITION.problems(document) == []
    return document


def attributes(document: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in document["attributes"]}


def nodes(*numbers: int, cpus: Collection[int] = range(65)) -> tuple[NumaNode, ...]:
    return tuple(NumaNode(n, (n,) if n in cpus else (), 96 * GIB, distances=(10, 11, 12, 13)) for n in numbers)


GPU = Allocatable(devices=(DeviceAssignment("nvidia.com/gpu", ("0",), (1,)),))


@pytest.mark.parametrize(
    ("numa_nodes", "state", "zones"),
    [
        pytest.param(nodes(10, 2, *range(3, 10), 0, 1), NODE, 11, id="in order of their number"),
        pytest.param(nodes(0, 64), NODE, 1, id="a number that the scheduler cannot take"),
        pytest.param(nodes(0, 1, cpus=[0]), NODE, 1, id="no CPUs and no devices at the end"),
        pytest.param(nodes(0, 1, cpus=[0]), replace(NODE, allocatable=GPU), 2, id="a device of another plugin"),
        # 1 is missing, as after GPU memory was taken offline.
        pytest.param(nodes(0, 2, 3, 4, cpus=[0]), replace(NODE, units={"rdma/hca": (offered("a", 3),)}), 4, id="gap"),
    ],
)
def test_zones_go_without_a_gap_up_to_the_last_with_cpus_or_devices(
    numa_nodes: tuple[NumaNode, ...], state: NodeState, zones: int
) -> None:
    found = built(replace(state, snapshot=Snapshot(numa_nodes=numa_nodes)))["zones"]
    assert [zone["name"] for zone in found] == [f"node-{n}" for n in range(zones)]
    if zones == 4:
        nothing = {"capacity": "0", "allocatable": "0", "available": "0"}
        assert found[1]["resources"] == [{"name": name, **nothing} for name in ("cpu", "memory")]
        costs = [{"name": f"node-{n}", "value": value} for n, value in ((0, 10), (2, 11), (3, 12))]
        assert found[0]["costs"] == costs


def test_parts_of_a_cpu_are_written_as_kubernetes_does_and_what_kubelet_leaves_open_is_left_out() -> None:
    state = NodeState("n", Snapshot(numa_nodes=(NumaNode(0, (0, 1), GIB),)), {})
    document = built(replace(state, kubelet=KubeletSettings(reserved_milli_cpu=250)))
    assert document["zones"][0]["resources"][0]["available"] == "1750m"
    assert document["topologyPolicies"] == ["None"]
    assert "topologyManagerMaxNUMANodes" not in attributes(document)


PODS = [("ns1", "n1"), ("ns1", "n2"), ("ns2", "n1"), ("ns3", "n1"), ("ns3", "n2")]


def test_without_a_watch_the_fingerprint_counts_the_pods_that_kubelet_lists_in_any_order() -> None:
    for pods in (PODS, PODS[::-1]):
        found = attributes(
            built(replace(NODE, pods=tuple(PodDevices(PodRef(*pod)) for pod in pods)), "podresources", "all")
        )
        assert found["nodeTopologyPodsFingerprint"] == "pfp0v001b92008c14168b3a6"
        assert found["nodeTopologyPodsFingerprintMethod"] == "all"
    assert fingerprint([]) == "pfp0v001ef46db3751d8e999"  # XXH64 of nothing, seed 0
    assert fingerprint([("a", "b")]) != fingerprint([("b", "a")])


def fingerprinted(watched: tuple[WatchedPod, ...], *rule: str) -> str:
    state = replace(NODE, units=UNITS, watched=watched, pods=(pod_with("other"),))
    return attributes(built(state, *rule))["nodeTopologyPodsFingerprint"]


@pytest.mark.parametrize(
    ("rule", "counted"),
    [
        (("dedicated", "all"), {"running", "ended", "failed", "owner", "device", "odd", "starter"}),
        (("shared", "all"), {"running", "owner", "device", "odd", "starter"}),
        (("dedicated", "with-exclusive-resources"), {"owner", "device", "odd", "starter"}),
        (("shared", "with-exclusive-resources", "v0.34"), {"owner", "device", "odd", "starter"}),
        (("dedicated", "with-exclusive-resources", "master"), {"owner", "device"}),
        (("shared", "with-exclusive-resources", "master"), {"owner", "device"}),
    ],
)
def test_the_fingerprint_counts_the_pods_that_the_scheduler_counts(rule: tuple[str, ...], counted: set[str]) -> None:
    pods = (
        WatchedPod("ns", "running", "1", "Running"),
        WatchedPod("ns", "waiting", "2", "Pending", True),
        WatchedPod("ns", "ended", "3", "Succeeded"),
        WatchedPod("ns", "failed", "4", "Failed"),
        WatchedPod("ns", "owner", "5", "Running", True),
        WatchedPod("ns", "device", "6", "Running", False, frozenset({"rdma/vf"})),
        WatchedPod("ns", "odd", "7", "Running", False, frozenset({"vendor.com/not-in-a-zone"})),
        WatchedPod("ns", "starter", "8", "Running", exclusive_init=True),
    )
    all_of_them = tuple(pod for pod in pods if pod.name in counted)
    forced = tuple(replace(pod, phase="Running", exclusive_native=True) for pod in all_of_them)
    assert fingerprinted(pods, *rule) == fingerprinted(forced, *rule)
    assert fingerprinted(pods, *rule) != fingerprinted(forced[1:], *rule)


def test_without_numa_information_there_is_nothing_to_publish() -> None:
    assert build(NodeState("n", Snapshot(), UNITS)) is None


def test_the_order_in_which_things_are_found_does_not_change_the_content() -> None:
    state = replace(NODE, units=UNITS)
    backwards = replace(
        state,
        snapshot=Snapshot(numa_nodes=TWO_SOCKETS.numa_nodes[::-1]),
        units={name: units[::-1] for name, units in UNITS.items()},
    )
    assert canonical(built(backwards)) == canonical(built(state))


def test_the_object_of_a_whole_node_is_as_it_was(node_snapshot: Callable[[str], Snapshot]) -> None:
    document = built(in_use(node_snapshot("h100-8gpu")))
    assert document == json.loads((OBJECTS / "noderesourcetopology.json").read_text())
