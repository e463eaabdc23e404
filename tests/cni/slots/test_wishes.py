"""What a pod's containers want: their slots once each, and which GPUs these should be near to."""

from __future__ import annotations

from agent.kubelet.checkpoint import Held
from agent.placement import Distances
from cni.slots.choice import Wish, wishes
from tests.deviceplugin.machines import gpu_uuid, node

DISTANCES = Distances(node(rails=4))
A, B, C, D = (gpu_uuid(n) for n in range(4))


def slot(number: int, name: str = "rdma:vf") -> str:
    return f"slot-{name}-0-{number}"


def held(container: str, *gpus: str, slots: tuple[str, ...] = (), **other: tuple[str, ...]) -> Held:
    return Held(container, {"nvidia.com/gpu": gpus, "rdma/vf": slots, **other})


def asked(*containers: Held, names: tuple[str, ...] = ("rdma/vf",)) -> tuple[Wish, ...]:
    return wishes(containers, names, DISTANCES)


def test_slots_want_to_be_near_the_gpus_of_their_container_in_the_drivers_order() -> None:
    found = asked(held("a", C, A, slots=(slot(1), slot(0))), held("b", D, slots=(slot(2),)))
    assert found == (
        Wish("a", "rdma/vf", (slot(1), slot(0)), (A, C)),
        Wish("b", "rdma/vf", (slot(2),), (D,)),
    )


def test_a_container_without_gpus_serves_those_of_containers_without_slots() -> None:
    found = asked(held("train", A, B), held("net", slots=(slot(0), slot(1))), held("other", D, slots=(slot(2),)))
    assert [wish.gpus for wish in found] == [(A, B), (D,)]


def test_a_container_without_gpus_is_near_the_pods_where_all_have_slots() -> None:
    found = asked(held("a", B, slots=(slot(0),)), held("b", slots=(slot(1),)))
    assert [wish.gpus for wish in found] == [(B,), (B,)]


def test_a_pod_without_gpus_wants_its_slots_all_the_same() -> None:
    assert asked(held("a", slots=(slot(0),))) == (Wish("a", "rdma/vf", (slot(0),), ()),)


def test_a_slot_given_on_by_an_init_container_is_bound_for_who_keeps_it() -> None:
    found = asked(held("worker", A, slots=(slot(3),)), held("setup", slots=(slot(3), slot(4))))
    assert [(wish.container, wish.slots) for wish in found] == [("worker", (slot(3),)), ("setup", (slot(4),))]


def test_each_resource_is_a_wish_of_its_own() -> None:
    containers = (Held("a", {"rdma/left": (slot(0, "rdma:left"),), "rdma/right": (slot(0, "rdma:right"),)}),)
    found = asked(*containers, names=("rdma/left", "rdma/right"))
    assert [wish.resource_name for wish in found] == ["rdma/left", "rdma/right"]


def test_units_that_are_no_slots_of_the_resource_are_left_alone() -> None:
    assert asked(held("a", A, slots=("0000:3b:02.1", "slot-rdma:other-0-1"))) == ()
    assert asked(held("a", A, slots=(slot(0),)), names=()) == ()


def test_nics_of_ours_that_are_called_like_gpus_draw_nothing_near() -> None:
    mine = Held("a", {"rdma/gpu_vf": (slot(0, "rdma:gpu_vf"),)}, {("rdma/gpu_vf", slot(0, "rdma:gpu_vf")): 1})
    (wish,) = wishes((mine,), ("rdma/gpu_vf",), DISTANCES, own_nics={"rdma/gpu_vf"})
    assert wish.gpus == ()
    (taken_for_one,) = wishes((mine,), ("rdma/gpu_vf",), DISTANCES)
    assert taken_for_one.gpus == ("numa:1",)
