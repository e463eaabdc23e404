"""The object for NodeResourceTopologyMatch, and how much of everything each NUMA node has, gives out, and has left."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cluster.object_watch import WatchedPod
from agent.cluster.topology.node_view import NodeState
from agent.cluster.topology.noderesourcetopology import build, by_zone, fingerprint, numa_nodes
from agent.cluster.topology.publisher import canonical
from agent.config.topology import Fingerprint
from agent.kubelet.kubelet_config import KubeletSettings
from agent.kubelet.podresources import Allocatable, DeviceAssignment, MemoryBlock, PodDevices
from agent.model.allocation import PodRef
from agent.model.device import NumaNode, Snapshot
from agent.model.health import HEALTHY, unhealthy
from hack.sim.cluster import definitions
from tests.agent.cluster.topology.nodes import GIB, NODE, OBJECTS, PAGE, TWO_SOCKETS, in_use, offered, pod_with

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


MIB = 1 << 20


ONE_SOCKET = replace(NODE, snapshot=Snapshot(numa_nodes=(NumaNode(0, (0, 1, 2, 3), 16 * GIB),)))


def amount(state: NodeState, zone: int, name: str) -> tuple[int, int, int] | None:
    found = (a for a in zones_of(state)[zone] if a.name == name)
    return next(((a.capacity, a.allocatable, a.available) for a in found), None)


def test_by_default_all_is_given_out_but_huge_pages_are_no_ordinary_memory() -> None:
    assert amount(NODE, 0, "cpu") == amount(NODE, 1, "cpu") == (4000, 4000, 4000)
    assert amount(NODE, 0, "memory") == (64 * GIB, 62 * GIB, 62 * GIB)
    assert amount(NODE, 1, "memory") == (32 * GIB, 32 * GIB, 32 * GIB)
    assert amount(NODE, 0, "hugepages-2Mi") == (2 * GIB, 2 * GIB, 2 * GIB)
    assert amount(NODE, 1, "hugepages-2Mi") == amount(NODE, 1, "hugepages-1Gi") == (0, 0, 0)


SOMEWHERE = KubeletSettings(reserved_milli_cpu=1000, reserved_memory_bytes=4 * GIB)
NAMED = KubeletSettings(reserved_cpus=frozenset({0, 4}), reserved_milli_cpu=9000, reserved_memory=((1, "memory", GIB),))
TOO_MUCH = KubeletSettings(reserved_milli_cpu=9000, reserved_memory_bytes=200 * GIB)
SHARE = KubeletSettings(eviction_bytes=0, eviction_share=0.25)


@pytest.mark.parametrize(
    ("state", "kubelet", "zone", "name", "available"),
    [
        (ONE_SOCKET, KubeletSettings(reserved_milli_cpu=1500), 0, "cpu", 2500),
        (ONE_SOCKET, KubeletSettings(reserved_memory_bytes=GIB), 0, "memory", 15 * GIB - 100 * MIB),
        (ONE_SOCKET, SHARE, 0, "memory", 12 * GIB),
        # From no zone that has room for all of it.
        (NODE, SOMEWHERE, 0, "cpu", 4000),
        (NODE, SOMEWHERE, 1, "memory", 32 * GIB),
        (NODE, KubeletSettings(reserved_milli_cpu=5000), 0, "cpu", 3000),
        (NODE, NAMED, 0, "cpu", 3000),
        (NODE, NAMED, 0, "memory", 62 * GIB),
        (NODE, NAMED, 1, "memory", 31 * GIB),
        (NODE, TOO_MUCH, 0, "cpu", 0),
        (NODE, TOO_MUCH, 1, "memory", 0),
    ],
)
def test_what_kubelet_reserves_is_taken_off(
    state: NodeState, kubelet: KubeletSettings, zone: int, name: str, available: int
) -> None:
    assert (amount(replace(state, kubelet=kubelet), zone, name) or ())[1:] == (available, available)


def test_what_managers_hand_out_counts_where_they_are_static_and_not_what_is_reserved() -> None:
    handed_out = (MemoryBlock("memory", 60 * GIB, (0,)), MemoryBlock("memory", 30 * GIB, (1,)))
    state = replace(
        NODE,
        pods=(pod_with(cpus={"c": (2, 3)}, memory=(MemoryBlock("memory", 10 * GIB, (0,)),)),),
        allocatable=Allocatable(cpu_ids=(1, 2, 3, 5, 6, 7), memory=handed_out),
        kubelet=TOO_MUCH,
    )
    assert [amount(state, zone, "cpu") for zone in (0, 1)] == [(4000, 3000, 1000), (4000, 3000, 3000)]
    assert amount(state, 0, "memory") == (64 * GIB, 60 * GIB, 50 * GIB)
    assert amount(state, 1, "memory") == (32 * GIB, 30 * GIB, 30 * GIB)
    assert amount(state, 0, "hugepages-2Mi") == (2 * GIB, 2 * GIB, 2 * GIB)


def test_memory_that_spans_zones_fills_them_in_order_as_kubelet_does() -> None:
    told = (MemoryBlock("memory", 60 * GIB, (0,)), MemoryBlock("memory", 30 * GIB, (1,)))
    pods = (
        pod_with("wide", memory=(MemoryBlock("memory", 70 * GIB, (0, 1)),)),
        pod_with("narrow", memory=(MemoryBlock("memory", 5 * GIB, (1,)),)),
    )
    state = replace(NODE, pods=pods, allocatable=Allocatable(memory=told))
    assert amount(state, 0, "memory") == (64 * GIB, 60 * GIB, 0)
    assert amount(state, 1, "memory") == (32 * GIB, 30 * GIB, 15 * GIB)


def test_devices_are_counted_per_zone_by_health_and_holder() -> None:
    units = (offered("a", 0), offered("b", 0, health=unhealthy("LinkDown")), offered("c", 1), offered("nowhere", -1))
    state = replace(NODE, units={"rdma/vf": units}, pods=(pod_with(units=["c"]),))
    assert amount(state, 0, "rdma/vf") == (2, 1, 1)
    assert amount(state, 1, "rdma/vf") == (1, 1, 0)
    assert amount(replace(state, pods=(pod_with(units=["b"]),)), 0, "rdma/vf") == (2, 1, 1)
    assert amount(replace(state, units={"rdma/vf": units[3:]}), 0, "rdma/vf") is None


def test_devices_of_other_plugins_are_counted_too_and_ours_not_twice() -> None:
    devices = (
        DeviceAssignment("nvidia.com/gpu", ("0", "1"), (0,)),
        DeviceAssignment("nvidia.com/gpu", ("2",), (1,)),
        DeviceAssignment("vendor.com/nowhere", ("n",), ()),
        DeviceAssignment("rdma/vf", ("a",), (0,)),
    )
    state = replace(
        NODE,
        units={"rdma/vf": (offered("0", 0),)},
        allocatable=Allocatable(devices=devices),
        pods=(pod_with(units=["0"], resource="nvidia.com/gpu"),),
    )
    assert amount(state, 0, "nvidia.com/gpu") == (2, 2, 1)
    assert amount(state, 1, "nvidia.com/gpu") == (1, 1, 1)
    assert amount(state, 0, "rdma/vf") == (1, 1, 1)
    assert amount(state, 0, "vendor.com/nowhere") is None


@st.composite
def nodes_and_grants(draw: st.DrawFn) -> NodeState:
    """A node of any shape, whose pods hold any of what there is."""
    numbers = sorted(draw(st.sets(st.integers(0, 4), min_size=1, max_size=4)))
    nodes, first = [], 0
    for number in numbers:
        count = draw(st.integers(0, 6))
        pages = draw(st.integers(0, 8))
        nodes.append(
            NumaNode(number, tuple(range(first, first + count)), draw(st.integers(32, 256)) * MIB, ((PAGE, pages),))
        )
        first += count
    units = tuple(
        offered(
            f"u{i}",
            draw(st.sampled_from([-1, *numbers])),
            health=draw(st.sampled_from([HEALTHY, unhealthy("LinkDown")])),
        )
        for i in range(draw(st.integers(0, 12)))
    )
    cpus = range(first)
    taken = draw(st.lists(st.sampled_from(cpus), unique=True)) if first else []
    told = draw(st.booleans())
    blocks = [MemoryBlock("memory", draw(st.integers(0, 300)) * MIB, (number,)) for number in numbers] if told else []
    wide = draw(st.lists(st.tuples(st.integers(0, 200), st.sets(st.sampled_from(numbers), min_size=1)), max_size=4))
    pods = [
        pod_with(
            "p",
            [unit.unit_id for unit in units if draw(st.booleans())],
            {"c": taken, "d": taken[:2]},
            tuple(MemoryBlock("memory", size * MIB, tuple(sorted(zones))) for size, zones in wide),
        )
    ]
    settings = KubeletSettings(
        reserved_milli_cpu=draw(st.integers(0, 3000)),
        reserved_memory_bytes=draw(st.integers(0, 64)) * MIB,
        reserved_memory=tuple((number, "memory", draw(st.integers(0, 16)) * MIB) for number in numbers),
        reserved_cpus=frozenset(draw(st.lists(st.sampled_from(cpus), max_size=2)) if first else ()),
        eviction_bytes=0,
    )
    handed_out = frozenset(cpus) - settings.reserved_cpus if draw(st.booleans()) else frozenset[int]()
    return NodeState(
        "n",
        Snapshot(numa_nodes=tuple(nodes)),
        {"rdma/vf": units},
        tuple(pods),
        Allocatable(cpu_ids=tuple(handed_out), memory=tuple(blocks)),
        settings,
    )


@given(nodes_and_grants())
def test_amounts_of_any_node_add_up(state: NodeState) -> None:
    zones, kubelet = zones_of(state), state.kubelet
    for amounts in zones.values():
        assert [a.name for a in amounts] == sorted({a.name for a in amounts})
        assert {"cpu", "memory", "hugepages-2Mi"} <= {a.name for a in amounts}
        assert all(0 <= a.available <= a.allocatable <= a.capacity for a in amounts)

    # What pods own is missing, and nothing else; it comes back when they end.
    def total(name: str, of: str) -> int:
        return sum(getattr(a, of) for amounts in zones.values() for a in amounts if a.name == name)

    (pod,) = state.pods
    owned = len(state.owned_cpus.intersection(state.allocatable.cpu_ids))
    assert total("cpu", "allocatable") - total("cpu", "available") == 1000 * owned
    placed = [unit for unit in state.units["rdma/vf"] if unit.numa_node >= 0 and unit.health.healthy]
    mine = sum(unit.unit_id in pod.all_device_ids for unit in placed)
    assert (total("rdma/vf", "allocatable"), total("rdma/vf", "available")) == (len(placed), len(placed) - mine)
    pinned = sum(block.size for block in pod.memory)
    assert 0 <= total("memory", "allocatable") - total("memory", "available") <= pinned
    after = {(z, a.name): a.available for z, amounts in zones_of(replace(state, pods=())).items() for a in amounts}
    assert after == {(z, a.name): a.allocatable for z, amounts in zones.items() for a in amounts}

    # Without managers kubelet admits what fits the node: a zone that has room for all of that must offer it.
    zones = zones_of(replace(state, allocatable=Allocatable(), pods=()))
    whole = 1000 * sum(len(node.cpus) for node in state.snapshot.numa_nodes)
    reserved = 1000 * len(kubelet.reserved_cpus) if kubelet.reserved_cpus else kubelet.reserved_milli_cpu
    for node in state.snapshot.numa_nodes:
        here = 1000 * len(set(node.cpus) - kubelet.reserved_cpus)
        assert total("cpu", "capacity") == whole
        assert [a.available for a in zones[node.number] if a.name == "cpu"] == [max(0, min(here, whole - reserved))]


def zones_of(state: NodeState) -> dict[int, Any]:
    return by_zone(numa_nodes(state.snapshot), state)
