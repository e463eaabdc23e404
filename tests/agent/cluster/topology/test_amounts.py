from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cluster.topology.noderesourcetopology import by_zone
from agent.cluster.topology.view import NodeState, PodUsage
from agent.kubelet.kubelet_config import KubeletSettings
from agent.kubelet.podresources import Allocatable, DeviceAssignment, MemoryBlock
from agent.model.device import NumaNode, Snapshot
from agent.model.health import HEALTHY, unhealthy
from tests.agent.cluster.topology.two_sockets import GIB, NODE, NOTHING_RESERVED, PAGE, offered

MIB = 1 << 20


ONE_SOCKET = replace(NODE, snapshot=Snapshot(numa_nodes=(NumaNode(0, (0, 1, 2, 3), 16 * GIB),)))


def amount(state: NodeState, zone: int, name: str) -> tuple[int, int, int] | None:
    nodes = {node.number: node for node in state.snapshot.numa_nodes}
    for found in by_zone(range(max(nodes) + 1), nodes, state)[zone]:
        if found.name == name:
            return found.capacity, found.allocatable, found.available
    return None


def held(*units: str, resource: str = "rdma/vf") -> tuple[PodUsage, ...]:
    return (PodUsage("ns", "p", frozenset((resource, unit) for unit in units)),)


def owning(*cpus: int, container: str = "c") -> PodUsage:
    return PodUsage("ns", container, cpus_of=((container, frozenset(cpus)),))


def test_by_default_all_is_given_out_but_huge_pages_are_no_ordinary_memory() -> None:
    assert amount(NODE, 0, "cpu") == amount(NODE, 1, "cpu") == (4000, 4000, 4000)
    assert amount(NODE, 0, "memory") == (64 * GIB, 62 * GIB, 62 * GIB)
    assert amount(NODE, 1, "memory") == (32 * GIB, 32 * GIB, 32 * GIB)
    assert amount(NODE, 0, "hugepages-2Mi") == (2 * GIB, 2 * GIB, 2 * GIB)
    assert amount(NODE, 1, "hugepages-2Mi") == amount(NODE, 1, "hugepages-1Gi") == (0, 0, 0)


def test_on_one_numa_node_allocatable_is_the_nodes_own() -> None:
    kubelet = KubeletSettings(reserved_milli_cpu=1500, reserved_memory_bytes=GIB)
    state = replace(ONE_SOCKET, kubelet=kubelet)
    assert amount(state, 0, "cpu") == (4000, 2500, 2500)
    rest = 15 * GIB - 100 * MIB
    assert amount(state, 0, "memory") == (16 * GIB, rest, rest)


def test_an_eviction_threshold_may_be_a_share() -> None:
    state = replace(ONE_SOCKET, kubelet=KubeletSettings(eviction_bytes=0, eviction_share=0.25))
    assert amount(state, 0, "memory") == (16 * GIB, 12 * GIB, 12 * GIB)


def test_what_is_reserved_somewhere_on_the_node_is_taken_from_no_zone_that_has_room_for_all() -> None:
    state = replace(NODE, kubelet=KubeletSettings(reserved_milli_cpu=1000, reserved_memory_bytes=4 * GIB))
    assert amount(state, 0, "cpu") == (4000, 4000, 4000)
    assert amount(state, 1, "memory") == (32 * GIB, 32 * GIB, 32 * GIB)
    greedy = replace(NODE, kubelet=KubeletSettings(reserved_milli_cpu=5000))
    assert amount(greedy, 0, "cpu") == (4000, 3000, 3000)


def test_reservations_that_name_cpus_or_a_numa_node_are_taken_off() -> None:
    kubelet = KubeletSettings(
        reserved_cpus=frozenset({0, 4}), reserved_milli_cpu=9000, reserved_memory=((1, "memory", GIB),)
    )
    state = replace(NODE, kubelet=kubelet)
    assert amount(state, 0, "cpu") == (4000, 3000, 3000)
    assert amount(state, 0, "memory") == (64 * GIB, 62 * GIB, 62 * GIB)
    assert amount(state, 1, "memory") == (32 * GIB, 31 * GIB, 31 * GIB)


def test_more_reserved_than_there_is_leaves_nothing() -> None:
    state = replace(NODE, kubelet=KubeletSettings(reserved_milli_cpu=9000, reserved_memory_bytes=200 * GIB))
    assert amount(state, 0, "cpu") == (4000, 0, 0)
    assert amount(state, 1, "memory") == (32 * GIB, 0, 0)


@pytest.mark.parametrize(("cpu_manager", "memory_manager"), list(product(("none", "static"), ("None", "Static"))))
def test_each_manager_is_heeded_for_what_it_manages(cpu_manager: str, memory_manager: str) -> None:
    """kubelet lists CPUs only with the static CPU manager, memory only with the Static memory manager."""
    pods = (owning(2, 3) if cpu_manager == "static" else PodUsage("ns", "c"),)
    block = MemoryBlock("memory", 10 * GIB, (0,))
    told = (MemoryBlock("memory", 60 * GIB, (0,)), MemoryBlock("memory", 30 * GIB, (1,)))
    if memory_manager == "Static":
        pods = (replace(pods[0], memory=(block,)),)
    state = replace(
        NODE,
        pods=pods,
        allocatable=Allocatable(
            cpu_ids=(1, 2, 3, 5, 6, 7) if cpu_manager == "static" else (),
            memory=told if memory_manager == "Static" else (),
        ),
        kubelet=KubeletSettings(
            cpu_manager=cpu_manager,
            memory_manager=memory_manager,
            reserved_milli_cpu=2000,
            reserved_memory_bytes=4 * GIB,
            eviction_bytes=0,
        ),
    )
    static, none = [(4000, 3000, 1000), (4000, 3000, 3000)], [(4000, 4000, 4000)] * 2
    assert [amount(state, zone, "cpu") for zone in (0, 1)] == (static if cpu_manager == "static" else none)
    told_amounts = [(64 * GIB, 60 * GIB, 50 * GIB), (32 * GIB, 30 * GIB, 30 * GIB)]
    reckoned = [(64 * GIB, 62 * GIB, 62 * GIB), (32 * GIB, 32 * GIB, 32 * GIB)]
    assert [amount(state, z, "memory") for z in (0, 1)] == (told_amounts if memory_manager == "Static" else reckoned)
    assert amount(state, 0, "hugepages-2Mi") == (2 * GIB, 2 * GIB, 2 * GIB)


def test_cpus_that_a_pods_containers_share_count_as_owned() -> None:
    pod = PodUsage("ns", "p", cpus_of=(("", frozenset({1, 2})), ("c", frozenset({2, 3}))))
    state = replace(NODE, pods=(pod,), allocatable=Allocatable(cpu_ids=tuple(range(8))))
    assert amount(state, 0, "cpu") == (4000, 4000, 1000)


def test_memory_that_spans_zones_fills_them_in_order_as_kubelet_does() -> None:
    told = (MemoryBlock("memory", 60 * GIB, (0,)), MemoryBlock("memory", 30 * GIB, (1,)))
    pods = (
        PodUsage("ns", "wide", memory=(MemoryBlock("memory", 70 * GIB, (0, 1)),)),
        PodUsage("ns", "narrow", memory=(MemoryBlock("memory", 5 * GIB, (1,)),)),
    )
    state = replace(NODE, pods=pods, allocatable=Allocatable(memory=told))
    assert amount(state, 0, "memory") == (64 * GIB, 60 * GIB, 0)
    assert amount(state, 1, "memory") == (32 * GIB, 30 * GIB, 15 * GIB)


def test_devices_are_counted_per_zone_by_health_and_holder() -> None:
    units = (offered("a", 0), offered("b", 0, health=unhealthy("LinkDown")), offered("c", 1))
    state = replace(NODE, units={"rdma/vf": units}, pods=held("c"))
    assert amount(state, 0, "rdma/vf") == (2, 1, 1)
    assert amount(state, 1, "rdma/vf") == (1, 1, 0)
    assert amount(replace(state, pods=held("b")), 0, "rdma/vf") == (2, 1, 1)


def test_a_slot_without_a_device_counts_where_it_stands() -> None:
    slots = tuple(offered(f"slot-vf-1-{n}", 1, device="") for n in range(3))
    assert amount(replace(NODE, units={"rdma/vf": slots}, pods=held("slot-vf-1-0")), 1, "rdma/vf") == (3, 3, 2)


def test_units_without_a_numa_node_are_in_no_zone() -> None:
    state = replace(NODE, units={"rdma/hca": (offered("x", -1), offered("y", -1))})
    assert [amount(state, zone, "rdma/hca") for zone in (0, 1)] == [None, None]


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
        pods=held("0", resource="nvidia.com/gpu"),
    )
    assert amount(state, 0, "nvidia.com/gpu") == (2, 2, 1)
    assert amount(state, 1, "nvidia.com/gpu") == (1, 1, 1)
    assert amount(state, 0, "rdma/vf") == (1, 1, 1)
    assert amount(state, 0, "vendor.com/nowhere") is None


def test_a_number_without_a_numa_node_has_nothing_of_what_every_zone_lists() -> None:
    nodes = (NumaNode(0, (0, 1), GIB, ((PAGE, 5),)), NumaNode(2, (), 96 * GIB))
    state = NodeState("gb200", Snapshot(numa_nodes=nodes), {}, kubelet=NOTHING_RESERVED)
    assert amount(state, 1, "cpu") == amount(state, 1, "memory") == amount(state, 1, "hugepages-2Mi") == (0, 0, 0)
    assert amount(state, 2, "cpu") == amount(state, 2, "hugepages-2Mi") == (0, 0, 0)
    assert amount(state, 2, "memory") == (96 * GIB, 96 * GIB, 96 * GIB)


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
        PodUsage(
            "ns",
            "p",
            frozenset(("rdma/vf", unit.unit_id) for unit in units if draw(st.booleans())),
            (("c", frozenset(taken)),),
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


def zones_of(state: NodeState) -> dict[int, Any]:
    nodes = {node.number: node for node in state.snapshot.numa_nodes}
    return by_zone(range(max(nodes) + 1), nodes, state)


@given(nodes_and_grants())
def test_available_never_exceeds_allocatable_nor_that_capacity(state: NodeState) -> None:
    zones = zones_of(state)
    for amounts in zones.values():
        assert [a.name for a in amounts] == sorted({a.name for a in amounts})
        assert {"cpu", "memory", "hugepages-2Mi"} <= {a.name for a in amounts}
        for found in amounts:
            assert 0 <= found.available <= found.allocatable <= found.capacity


@given(nodes_and_grants())
def test_what_pods_own_is_missing_in_the_zones_and_nothing_else(state: NodeState) -> None:
    zones = zones_of(state)

    def total(name: str, of: str) -> int:
        return sum(getattr(a, of) for amounts in zones.values() for a in amounts if a.name == name)

    (pod,) = state.pods
    if state.allocatable.cpu_ids:
        assert total("cpu", "allocatable") - total("cpu", "available") == 1000 * len(
            pod.cpus.intersection(state.allocatable.cpu_ids)
        )
    else:
        assert total("cpu", "allocatable") == total("cpu", "available")
    placed = [unit for unit in state.units["rdma/vf"] if unit.numa_node >= 0 and unit.health.healthy]
    mine = sum(("rdma/vf", unit.unit_id) in pod.units for unit in placed)
    assert total("rdma/vf", "allocatable") == len(placed)
    assert total("rdma/vf", "available") == len(placed) - mine
    pinned = sum(block.size for block in pod.memory)
    assert 0 <= total("memory", "allocatable") - total("memory", "available") <= pinned


@given(nodes_and_grants())
def test_a_pod_that_ends_gives_back_all_that_it_held(state: NodeState) -> None:
    before = {(z, a.name): a.allocatable for z, amounts in zones_of(state).items() for a in amounts}
    after = {(z, a.name): a.available for z, amounts in zones_of(replace(state, pods=())).items() for a in amounts}
    assert after == before


@given(nodes_and_grants())
def test_no_zone_gives_less_than_kubelet_could_put_there(state: NodeState) -> None:
    """Without managers kubelet admits what fits the node: a zone that has room for all of that must offer it."""
    state = replace(state, allocatable=Allocatable(), pods=())
    zones, kubelet = zones_of(state), state.kubelet
    whole = 1000 * sum(len(node.cpus) for node in state.snapshot.numa_nodes)
    reserved = 1000 * len(kubelet.reserved_cpus) if kubelet.reserved_cpus else kubelet.reserved_milli_cpu
    for node in state.snapshot.numa_nodes:
        here = 1000 * len(set(node.cpus) - kubelet.reserved_cpus)
        (cpu,) = [a for a in zones[node.number] if a.name == "cpu"]
        assert cpu.available == max(0, min(here, whole - reserved))
