"""Which devices slots get: the best for all of a pod's GPUs together, else those of the slots' own NUMA node."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.kubelet.checkpoint import Held
from agent.model.health import HEALTHY
from agent.offer.offer import Unit
from agent.placement import Distances
from cni.slots.choice import Choice, Wish, choose, wishes
from tests.node import gpu_uuid, node

NODE = node(rails=4, vfs=4)
DISTANCES = Distances(NODE)


def vf(rail: int, index: int = 0) -> Unit:
    pf = [d for d in NODE.devices if d.vfs][rail]
    address = pf.vfs[index]
    return Unit(address, "rdma/vf", "vf", address, HEALTHY, pf.numa_node)


def wish(container: str, *slots: str, gpus: tuple[int, ...] = ()) -> Wish:
    return Wish(container, "rdma/vf", tuple(f"slot-rdma:vf-{s}" for s in slots), tuple(gpu_uuid(n) for n in gpus))


def chosen(wishes: list[Wish], free: list[Unit], **load: int) -> tuple[Choice, ...]:
    found = choose(DISTANCES, wishes, free, load)
    assert found is not None
    return found


def test_a_slot_stands_for_a_device_of_its_own_numa_node_if_there_is_one() -> None:
    (choice,) = chosen([wish("a", "0-0", "1-0", gpus=(2, 0))], [vf(0), vf(2)])
    assert choice.pairs == (("slot-rdma:vf-1-0", vf(2).device), ("slot-rdma:vf-0-0", vf(0).device))


def test_without_spread_the_port_with_most_in_use_is_filled_first() -> None:
    free = [vf(rail, index) for rail in range(2) for index in range(3)]
    first, second = (DISTANCES.port(vf(rail).device) for rail in range(2))
    for spread, ports in ((False, [second] * 3), (True, [first, first, second])):
        found = choose(DISTANCES, [wish("a", "0-0", "0-1", "0-2")], free, {second: 1}, spread=spread)
        assert found is not None
        assert sorted(map(DISTANCES.port, found[0].devices)) == ports


def test_without_gpus_a_slot_gets_a_device_of_its_own_numa_node() -> None:
    (choice,) = chosen([wish("a", "1-0")], [vf(0), vf(1), vf(3)])
    assert choice.devices == (vf(3).device,)
    (choice,) = chosen([wish("a", "1-0")], [vf(0)])
    assert choice.devices == (vf(0).device,)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_other_choice_has_nearer_pairs(data: st.DataObject) -> None:
    free = data.draw(st.lists(st.builds(vf, st.integers(0, 3), st.integers(0, 1)), unique=True, min_size=1, max_size=6))
    gpus = data.draw(st.lists(st.integers(0, 3), unique=True, min_size=1, max_size=min(4, len(free))))
    cut = data.draw(st.integers(0, len(gpus)))
    parts = [part for part in (tuple(gpus[:cut]), tuple(gpus[cut:])) if part]
    wishes = [
        wish(f"c{i}", *(f"0-{i}{n}" for n in range(len(part))), gpus=tuple(sorted(part)))
        for i, part in enumerate(parts)
    ]
    found = chosen(wishes, free)
    slots = [slot for choice in found for slot, _ in choice.pairs]
    assert sorted(slots) == sorted(slot for each in wishes for slot in each.slots)
    got = sorted(
        (DISTANCES.distance(gpu, device) for c in found for gpu, device in zip(c.wish.gpus, c.devices, strict=True)),
        reverse=True,
    )
    best = min(
        (
            (max(pairs), sum(pairs))
            for order in permutations([unit.device for unit in free], len(gpus))
            if (pairs := [DISTANCES.distance(gpu_uuid(gpu), device) for gpu, device in zip(gpus, order, strict=True)])
        ),
    )
    assert (got[0], sum(got)) == best


# ----------------------------------------------------------------------------- what a pod's containers want

A, B, C, D = (gpu_uuid(n) for n in range(4))


def slot(number: int, name: str = "rdma:vf") -> str:
    return f"slot-{name}-0-{number}"


def held(container: str, *gpus: str, slots: tuple[str, ...] = (), **other: tuple[str, ...]) -> Held:
    return Held(container, {"nvidia.com/gpu": gpus, "rdma/vf": slots, **other})


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        pytest.param(
            [held("a", C, A, slots=(slot(1), slot(0))), held("b", D, slots=(slot(2),))],
            [("a", (slot(1), slot(0)), (A, C)), ("b", (slot(2),), (D,))],
            id="near the GPUs of their container in the driver's order",
        ),
        pytest.param(
            [held("train", A, B), held("net", slots=(slot(0), slot(1))), held("other", D, slots=(slot(2),))],
            [("net", (slot(0), slot(1)), (A, B)), ("other", (slot(2),), (D,))],
            id="without GPUs near those of containers without slots",
        ),
        pytest.param(
            [held("a", B, slots=(slot(0),)), held("b", slots=(slot(1),))],
            [("a", (slot(0),), (B,)), ("b", (slot(1),), (B,))],
            id="without GPUs near the pod's where all have slots",
        ),
        pytest.param(
            [held("worker", A, slots=(slot(3),)), held("setup", slots=(slot(3), slot(4)))],
            [("worker", (slot(3),), (A,)), ("setup", (slot(4),), (A,))],
            id="given on by an init container for who keeps it",
        ),
        pytest.param([held("a", A, slots=("0000:3b:02.1", "slot-rdma:other-0-1"))], [], id="no slots of the resource"),
    ],
)
def test_what_the_slots_of_a_pods_containers_want(
    containers: list[Held], expected: list[tuple[str, tuple[str, ...], tuple[str, ...]]]
) -> None:
    found = wishes(containers, ("rdma/vf",), DISTANCES)
    assert [(wish.container, wish.slots, wish.gpus) for wish in found] == expected
    assert wishes(containers, (), DISTANCES) == ()


def test_nics_of_ours_that_are_called_like_gpus_draw_nothing_near() -> None:
    mine = Held("a", {"rdma/gpu_vf": (slot(0, "rdma:gpu_vf"),)}, {("rdma/gpu_vf", slot(0, "rdma:gpu_vf")): 1})
    (wish,) = wishes((mine,), ("rdma/gpu_vf",), DISTANCES, own_nics={"rdma/gpu_vf"})
    assert wish.gpus == ()
    (taken_for_one,) = wishes((mine,), ("rdma/gpu_vf",), DISTANCES)
    assert taken_for_one.gpus == ("numa:1",)
