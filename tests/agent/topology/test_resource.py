from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent.model.device import NumaNode, Snapshot
from agent.model.health import HEALTHY, Health, unhealthy
from agent.topology.kubelet_config import KubeletSettings
from agent.topology.resource import Allocatable, MemoryBlock, NodeState, PodUsage, build, canonical

GIB = 1 << 30
PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class FakeUnit:
    unit_id: str
    numa_node: int
    resource_name: str = "rdma/vf"
    health: Health = HEALTHY

    @property
    def device(self) -> str:
        return self.unit_id


TWO_SOCKETS = Snapshot(
    numa_nodes=(
        NumaNode(0, (0, 1, 2, 3), 64 * GIB, ((PAGE, 1024), (GIB, 0)), (10, 21)),
        NumaNode(1, (4, 5, 6, 7), 32 * GIB, ((PAGE, 0), (GIB, 0)), (21, 10)),
    )
)
UNITS = {"rdma/vf": (FakeUnit("a", 0), FakeUnit("b", 0, health=unhealthy("LinkDown")), FakeUnit("c", 1))}
NODE = NodeState("worker-1", TWO_SOCKETS, UNITS)


def built(state: NodeState) -> dict[str, Any]:
    document = build(state)
    assert document is not None
    return document


def amounts(document: dict[str, Any], zone: int, resource: str) -> tuple[int, int, int] | None:
    for item in document["zones"][zone]["resources"]:
        if item["name"] == resource:
            return int(item["capacity"]), int(item["allocatable"]), int(item["available"])
    return None


def attributes(document: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in document["attributes"]}


def test_it_is_named_after_the_node_and_owned_by_it() -> None:
    document = built(replace(NODE, node_uid="uid-1"))
    assert (document["apiVersion"], document["kind"]) == ("topology.node.k8s.io/v1alpha2", "NodeResourceTopology")
    assert document["metadata"] == {
        "name": "worker-1",
        "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "worker-1", "uid": "uid-1"}],
    }
    assert "ownerReferences" not in built(NODE)["metadata"]


def test_every_numa_node_is_a_zone_with_costs_from_the_slit() -> None:
    zones = built(NODE)["zones"]
    assert [(zone["name"], zone["type"]) for zone in zones] == [("node-0", "Node"), ("node-1", "Node")]
    assert zones[0]["costs"] == [{"name": "node-0", "value": 10}, {"name": "node-1", "value": 21}]


def test_cpu_memory_and_hugepages_are_in_every_zone_and_wholly_available_by_default() -> None:
    document = built(NODE)
    assert amounts(document, 0, "cpu") == (4, 4, 4)
    assert amounts(document, 1, "cpu") == (4, 4, 4)
    assert amounts(document, 0, "memory") == (64 * GIB, 62 * GIB, 62 * GIB)
    assert amounts(document, 1, "memory") == (32 * GIB, 32 * GIB, 32 * GIB)
    assert amounts(document, 0, "hugepages-2Mi") == (2 * GIB, 2 * GIB, 2 * GIB)
    assert amounts(document, 1, "hugepages-2Mi") == (0, 0, 0)
    assert amounts(document, 1, "hugepages-1Gi") == (0, 0, 0)


def test_devices_are_counted_per_zone_by_health_and_holder() -> None:
    document = built(replace(NODE, pods=(PodUsage("ns", "p", frozenset({"c"})),)))
    assert amounts(document, 0, "rdma/vf") == (2, 1, 1)
    assert amounts(document, 1, "rdma/vf") == (1, 1, 0)


def test_a_held_unit_that_turned_unhealthy_is_not_subtracted_twice() -> None:
    document = built(replace(NODE, pods=(PodUsage("ns", "p", frozenset({"b"})),)))
    assert amounts(document, 0, "rdma/vf") == (2, 1, 1)


def test_units_without_a_numa_node_are_in_no_zone() -> None:
    document = built(replace(NODE, units={"rdma/hca": (FakeUnit("x", -1), FakeUnit("y", -1))}))
    assert [amounts(document, zone, "rdma/hca") for zone in (0, 1)] == [None, None]


def test_exclusive_cpus_and_memory_are_taken_off_with_static_managers() -> None:
    pod = PodUsage("ns", "p", cpus=frozenset({2, 3}), memory=(MemoryBlock("memory", 10 * GIB, (0,)),))
    handed_out = Allocatable(frozenset({1, 2, 3, 5, 6, 7}), (MemoryBlock("memory", 60 * GIB, (0,)),))
    document = built(replace(NODE, pods=(pod,), allocatable=handed_out))
    assert amounts(document, 0, "cpu") == (4, 3, 1)
    assert amounts(document, 1, "cpu") == (4, 3, 3)
    assert amounts(document, 0, "memory") == (64 * GIB, 60 * GIB, 50 * GIB)


def test_memory_that_spans_zones_counts_in_each() -> None:
    pod = PodUsage("ns", "p", memory=(MemoryBlock("memory", 10 * GIB, (0, 1)),))
    document = built(replace(NODE, pods=(pod,)))
    assert amounts(document, 0, "memory") == (64 * GIB, 62 * GIB, 57 * GIB)
    assert amounts(document, 1, "memory") == (32 * GIB, 32 * GIB, 27 * GIB)


def test_reservations_that_name_cpus_or_a_numa_node_are_taken_off() -> None:
    kubelet = KubeletSettings(reserved_cpus=frozenset({0, 4}), reserved_memory=((1, "memory", GIB),))
    document = built(replace(NODE, kubelet=kubelet))
    assert amounts(document, 0, "cpu") == (4, 3, 3)
    assert amounts(document, 1, "memory") == (32 * GIB, 31 * GIB, 31 * GIB)


def test_a_memory_only_node_is_a_zone_and_a_gap_is_filled_with_an_empty_one() -> None:
    nodes = (NumaNode(0, (0, 1), GIB, distances=(10, 80)), NumaNode(2, (), 96 * GIB, distances=(80, 10)))
    document = built(NodeState("gb200", Snapshot(numa_nodes=nodes), {}))
    assert [zone["name"] for zone in document["zones"]] == ["node-0", "node-1", "node-2"]
    assert amounts(document, 1, "cpu") == amounts(document, 1, "memory") == (0, 0, 0)
    assert amounts(document, 2, "cpu") == (0, 0, 0)
    assert amounts(document, 2, "memory") == (96 * GIB, 96 * GIB, 96 * GIB)
    assert document["zones"][0]["costs"] == [{"name": "node-0", "value": 10}, {"name": "node-2", "value": 80}]


def test_numbers_the_scheduler_cannot_take_are_left_out() -> None:
    nodes = (NumaNode(0, (0,), GIB), NumaNode(64, (1,), GIB))
    assert len(built(NodeState("big", Snapshot(numa_nodes=nodes), {}))["zones"]) == 1


def test_zones_are_in_order_of_their_number() -> None:
    nodes = tuple(NumaNode(n, (n,), GIB) for n in (10, 2, *range(3, 10), 0, 1))
    document = built(NodeState("n", Snapshot(numa_nodes=nodes), {}))
    assert [zone["name"] for zone in document["zones"]] == [f"node-{n}" for n in range(11)]


def test_policy_and_scope_are_kubelets_words() -> None:
    kubelet = KubeletSettings(policy="single-numa-node", scope="pod", max_numa_nodes="36")
    found = attributes(built(replace(NODE, kubelet=kubelet)))
    assert found["topologyManagerPolicy"] == "single-numa-node"
    assert found["topologyManagerScope"] == "pod"
    assert found["topologyManagerMaxNUMANodes"] == "36"
    assert "topologyManagerMaxNUMANodes" not in attributes(built(NODE))


def test_the_fingerprint_counts_every_pod() -> None:
    pods = tuple(
        PodUsage(ns, n) for ns, n in [("ns1", "n1"), ("ns1", "n2"), ("ns2", "n1"), ("ns3", "n1"), ("ns3", "n2")]
    )
    found = attributes(built(replace(NODE, pods=pods)))
    assert found["nodeTopologyPodsFingerprint"] == "pfp0v001b92008c14168b3a6"
    assert found["nodeTopologyPodsFingerprintMethod"] == "all"


def test_without_numa_information_there_is_nothing_to_publish() -> None:
    assert build(NodeState("n", Snapshot(), UNITS)) is None


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.booleans(), st.booleans()), max_size=30),
    st.sets(st.integers(0, 3), min_size=1),
)
def test_available_never_exceeds_allocatable_nor_that_capacity(
    shape: list[tuple[int, bool, bool]], numbers: set[int]
) -> None:
    units = tuple(
        FakeUnit(f"u{i}", numa, health=HEALTHY if healthy else unhealthy("LinkDown"))
        for i, (numa, healthy, _) in enumerate(shape)
    )
    held = frozenset(f"u{i}" for i, (_, _, taken) in enumerate(shape) if taken)
    snapshot = Snapshot(numa_nodes=tuple(NumaNode(n, (n,), GIB, ((PAGE, 5),)) for n in sorted(numbers)))
    document = built(NodeState("n", snapshot, {"rdma/vf": units}, (PodUsage("ns", "p", held),)))
    assert [zone["name"] for zone in document["zones"]] == [f"node-{n}" for n in range(max(numbers) + 1)]
    for zone in document["zones"]:
        for item in zone["resources"]:
            assert 0 <= int(item["available"]) <= int(item["allocatable"]) <= int(item["capacity"])


def test_the_order_in_which_things_are_found_does_not_change_the_content() -> None:
    backwards = replace(
        NODE,
        snapshot=Snapshot(numa_nodes=TWO_SOCKETS.numa_nodes[::-1]),
        units={name: units[::-1] for name, units in UNITS.items()},
    )
    assert canonical(built(backwards)) == canonical(built(NODE))
