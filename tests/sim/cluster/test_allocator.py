"""The stand-in for the scheduler chooses as the real one was seen to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def device(name: str, attributes: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "attributes": attributes or {}, **more}


def shared(name: str, value: str, policy: Mapping[str, Any] | None = None, capacity: str = "d.io/part") -> Document:
    of = {"value": value} | ({"requestPolicy": policy} if policy else {})
    return device(name, allowMultipleAllocations=True, capacity={capacity: of})


def slice_of(
    *devices: Document, name: str = "s", driver: str = "d.io", count: int = 1, generation: int = 1
) -> Document:
    pool = {"name": NODE, "resourceSliceCount": count, "generation": generation}
    spec = {"driver": driver, "nodeName": NODE, "pool": pool, "devices": list(devices)}
    return {"metadata": {"name": name}, "spec": spec}


def node(*slices: Document, limit: float = 10.0) -> Node:
    return Node(NODE, slices, ANY_CLASS, limit)


def ask(*requests: Document, constraints: Sequence[Document] = ()) -> Document:
    return claim(requests, constraints)


def request(name: str = "r", **exactly: Any) -> Document:
    return {"name": name, "exactly": {"deviceClassName": "any", **exactly}}


def given(of: Node, wanted: Document, name: str = "c") -> list[str] | None:
    found = of.allocate({name: wanted})
    return [result["device"] for result in found[name]] if found is not None else None


def test_the_first_that_fits_is_taken_by_driver_then_slice_then_place_in_the_list() -> None:
    slices = [
        slice_of(device("x"), driver="z.io"),
        slice_of(device("c"), name="2", count=2),
        slice_of(device("b"), device("a"), name="1", count=2),
    ]
    assert given(node(*slices), ask(request(count=4))) == ["b", "a", "c", "x"]


def test_a_match_needs_the_attribute_of_the_same_type_and_a_plain_name_is_the_drivers() -> None:
    wanted = ask(request("x"), request("y"), constraints=[{"matchAttribute": "d.io/at"}])
    for first, second, is_met in (
        ({"d.io/at": {"int": 1}}, {"at": {"int": 1}}, True),
        ({"at": {"int": 1}}, {"at": {"string": "1"}}, False),
        ({"at": {"int": 1}}, {}, False),
        ({"at": {"int": 1}}, {"e.io/at": {"int": 1}}, False),
        ({"at": {"strings": ["a", "b"]}}, {"at": {"string": "b"}}, True),
    ):
        here = node(slice_of(device("a", first), device("b", second)))
        assert (given(here, wanted) is not None) is is_met


def test_parts_of_a_device_are_taken_until_nothing_is_left_and_count_takes_different_devices() -> None:
    policy = {"default": "1", "validRange": {"min": "1", "step": "1"}}
    here = node(slice_of(shared("s", "2", policy)))
    assert given(here, ask(request(count=2))) is None
    assert [given(here, ask(request()), f"c{n}") for n in range(3)] == [["s"], ["s"], None]
    here.release("c0")
    assert given(here, ask(request("x")), "again") == ["s"]


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
