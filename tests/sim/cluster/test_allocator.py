"""The stand-in for the scheduler chooses as the real one was seen to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from hack.sim.cluster.allocator import Node, extended_claim
from hack.sim.cluster.claims_for_pairs import (
    NIC_CLASS,
    UUID,
    claim,
    classes,
    gpu_slice,
    pairs,
    preferred_pairs,
)
from tests.deviceplugin.dra.nodes import GPU_NODES, HCA, NODE, VF, Offered, late, recorded_node
from tests.node import node as made_up

Document = Mapping[str, Any]
ANY_CLASS: Mapping[str, Document] = {"any": {"spec": {}}}


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_unchanged_pods_may_ask_for_several_vfs_though_all_stand_in_one_place(count: int) -> None:
    snapshot = replace(made_up(rails=1, vfs=8), gpus=())
    here = Node(NODE, Offered(snapshot, [late(VF)]).slices, classes("rdma/vf"))
    container = {"name": "c", "resources": {"limits": {"rdma/vf": str(count)}}}
    made = extended_claim({"metadata": {"name": "p"}, "spec": {"containers": [container]}}, here.classes)
    assert made is not None
    assert [here.allocate({f"c{n}": made}) is not None for n in range(8 // count + 1)] == [True] * (8 // count) + [
        False
    ]


def scheduler(name: str, offered: Offered) -> Node:
    return Node(NODE, [gpu_slice(recorded_node(name), NODE), *offered.slices], classes(offered.resources[0].name))


@pytest.mark.parametrize("name", [name for name in GPU_NODES if name != "efa"])
def test_all_gpus_of_a_node_find_their_nics_in_one_claim(name: str) -> None:
    gpus = len(recorded_node(name).gpus)
    for resource in (VF, late(VF)):
        found = scheduler(name, Offered(recorded_node(name), [resource])).allocate({"c": pairs(gpus, UUID)})
        assert found is not None
        assert len(found["c"]) == 2 * gpus


@pytest.mark.parametrize("name", GPU_NODES)
def test_shared_adapters_bound_late_are_matched_by_every_gpu(name: str) -> None:
    here = scheduler(name, Offered(recorded_node(name), [late(HCA)]))
    assert here.allocate({"c": pairs(len(recorded_node(name).gpus), UUID)}) is not None


def test_the_nearest_is_preferred_where_the_nic_comes_first_and_another_taken_where_none_is_left() -> None:
    offered = Offered(recorded_node("h100-8gpu"), [late(VF)])
    here = scheduler("h100-8gpu", offered)
    for number in range(8):
        found = here.allocate({f"c{number}": preferred_pairs(1, UUID)})
        assert found is not None
        assert found[f"c{number}"][0]["request"] == "nic-0/near"
    here.release("c3")
    expression = 'device.attributes["nodefabric.io"].rail == 3'
    rail = {"name": "r", "exactly": {"deviceClassName": NIC_CLASS, "selectors": [{"cel": {"expression": expression}}]}}
    for number in range(8):
        assert here.allocate({f"other{number}": claim([rail])}) is not None
    found = here.allocate({"last": preferred_pairs(1, UUID)})
    assert found is not None
    assert [result["request"] for result in found["last"]] == ["nic-0/any", "gpu-0"]
