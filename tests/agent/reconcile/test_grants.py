"""Which units are taken over, bound, freed or moved. Kubelet's word decides, and nothing in a pod is freed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from agent.kubelet.podresources import HeldUnit
from agent.model.allocation import Hold, PodRef, Spec
from agent.reconcile.grants import Action, Bind, Ended, Move, Release, TakeOver, decide

A, B, C = "0000:3b:00.2", "0000:3b:00.3", "0000:3b:00.4"
POD, NEXT = PodRef("default", "a", "uid"), PodRef("default", "b")


def grant(unit: str, device: str | None = None, pod: PodRef | None = POD, at: float = 0.0) -> Hold:
    return Hold(unit, "rdma/vf", (device or unit,), at, pod)


def held(unit: str, pod: PodRef = POD) -> HeldUnit:
    return HeldUnit(pod, "rdma/vf", unit)


def decided(
    holds: Sequence[Hold] = (),
    held_units: Sequence[HeldUnit] = (),
    offered: Mapping[str, tuple[str, ...]] | None = None,
    attached: Collection[str] = (),
    moved: Mapping[str, str] | None = None,
    ended: Sequence[Ended] = (),
    noted: Collection[str] = (),
) -> tuple[Action, ...]:
    return decide(
        *(holds, held_units),
        offered=offered,
        attached=attached,
        moved=moved or {},
        asked_at=160.0,
        unclaimed_before=100.0,
        ended=ended,
        noted=noted,
    )


NEW, OTHERS = grant(A, at=140.0), grant(B, at=140.0, pod=NEXT)
ENDED = Ended(POD, 150.0)
NAMED = replace(grant(A, pod=None), spec=Spec("hca", {"deviceNodes": [{"path": "/dev/infiniband/uverbs0"}]}))
SLOT = "slot-rdma:vf-0-0"
BOUND = grant(SLOT, A)
RAIL, NICS, SOON = "rail-GPU-1", ("0000:3b:00.0", "0000:3c:00.0"), (A, "0000:5b:00.0")
GRANTED_RAIL = Hold(RAIL, "rdma/rail", tuple(NICS), 0.0, POD)
MOVED_NIC = {NICS[1]: "0000:5b:00.0"}


@pytest.mark.parametrize(
    ("holds", "held_units", "facts", "expected"),
    [
        ([grant(A)], [held(A)], {"offered": {A: (A,)}}, ()),
        # A unit that a pod has is taken over once it is offered, and goes to the pod that has it now.
        ([], [held(A)], {}, ()),
        ([], [held(A)], {"offered": {}}, ()),
        ([], [held(A)], {"offered": {A: (A,)}}, (TakeOver(held(A), (A,)),)),
        ([grant(A, pod=None)], [held(A)], {}, (Bind(held(A)),)),
        ([grant(A)], [held(A, NEXT)], {}, (Bind(held(A, NEXT)),)),
        # What kubelet said before a unit was granted again is of another pod.
        ([grant(A, pod=NEXT, at=170.0)], [held(A)], {"offered": {A: (A,)}}, ()),
        # An old grant that no pod has is free, a new one with the end of its pod, before kubelet was asked.
        ([grant(A), grant(B, at=150.0)], [], {}, (Release(A),)),
        ([NEW, OTHERS], [], {"ended": [ENDED]}, (Release(A),)),
        ([NEW, OTHERS], [], {"ended": [Ended(PodRef("default", "a"), 150.0)]}, (Release(A),)),
        ([NEW], [], {"ended": [Ended(NEXT, 150.0)]}, ()),
        ([NEW], [], {"ended": [Ended(PodRef("default", "a", "uid of the pod before"), 150.0)]}, ()),
        ([replace(NEW, pod=None)], [], {"ended": [ENDED]}, ()),
        ([grant(A, at=155.0)], [], {"ended": [ENDED]}, ()),  # the next pod of this name
        ([NEW], [], {"ended": [Ended(POD, 165.0)]}, ()),
        ([NEW], [held(A)], {"ended": [ENDED]}, ()),
        # What is in a pod stays.
        ([NEW], [], {"ended": [ENDED], "attached": [A]}, ()),
        ([grant(A)], [], {"attached": [A]}, ()),
        ([grant(A)], [held(A)], {"offered": {A: (B,)}, "attached": [A]}, ()),
        # A unit whose address is gone follows its VF, but one that is offered stays what its container was told.
        ([grant(A)], [held(A)], {"offered": {B: (B,)}, "moved": {A: B}}, (Move(A, (B,), "renumbered"),)),
        ([grant(A)], [held(A)], {"offered": {A: (A,), B: (B,)}, "moved": {A: B, B: A}}, ()),
        ([grant(A)], [held(A)], {"moved": {A: B}}, ()),
        (
            [grant("hca-1-0", A)],
            [held("hca-1-0")],
            {"offered": {"hca-1-0": (B,)}},
            (Move("hca-1-0", (B,), "offered-elsewhere"),),
        ),
        # None follows to where another pod is.
        ([grant(A), grant(B, pod=NEXT)], [held(A), held(B, NEXT)], {"offered": {B: (B,)}, "moved": {A: B}}, ()),
        (
            [grant(A)],
            [held(A), held(B, NEXT)],
            {"offered": {B: (B,)}, "moved": {A: B}},
            (TakeOver(held(B, NEXT), (B,)),),
        ),
        # What an init container has keeps its spec while kubelet notes it.
        ([NAMED], [], {"offered": {A: (A,)}, "noted": {A}}, ()),
        ([NAMED], [], {"offered": {A: (A,)}}, (Release(A),)),
        ([replace(NAMED, pod=POD)], [], {"offered": {A: (A,)}, "noted": {A}}, (Release(A),)),
        # A slot that is bound is its sandbox's, whatever kubelet says. Its device is chosen for its pod.
        ([BOUND], [], {"offered": {SLOT: ()}, "ended": [ENDED]}, ()),
        ([BOUND], [held(SLOT, NEXT)], {"offered": {SLOT: (A,)}}, ()),
        ([BOUND], [held(SLOT)], {"offered": {SLOT: ()}, "moved": {A: B}}, ()),
        ([], [held(SLOT)], {"offered": {SLOT: (A,)}}, (TakeOver(held(SLOT), ()),)),
        ([replace(BOUND, devices=())], [], {}, (Release(SLOT),)),
        # A rail with several NICs: all of them count.
        ([GRANTED_RAIL], [], {"offered": {RAIL: NICS}}, (Release(RAIL),)),
        ([GRANTED_RAIL], [], {"offered": {RAIL: NICS}, "attached": {NICS[1]}}, ()),
        ([GRANTED_RAIL], [held(RAIL)], {"offered": {RAIL: NICS}}, ()),
        ([GRANTED_RAIL], [held(RAIL)], {"offered": {RAIL: SOON}}, (Move(RAIL, SOON, "offered-elsewhere"),)),
        (
            [GRANTED_RAIL],
            [held(RAIL)],
            {"offered": {}, "moved": MOVED_NIC},
            (Move(RAIL, (NICS[0], "0000:5b:00.0"), "renumbered"),),
        ),
        (
            [GRANTED_RAIL],
            [held(RAIL), held("rail-GPU-2")],
            {"offered": {"rail-GPU-2": SOON}, "moved": MOVED_NIC},
            (TakeOver(held("rail-GPU-2"), SOON),),
        ),
    ],
)
def test_kubelets_word_decides_and_nothing_in_a_pod_is_freed(
    holds: Sequence[Hold], held_units: Sequence[HeldUnit], facts: Mapping[str, Any], expected: tuple[Action, ...]
) -> None:
    assert decided(holds, held_units, **facts) == expected


units = some.sampled_from([A, B, C, "hca-1-0"])
holds_ = some.lists(
    some.builds(grant, units, units, some.sampled_from([None, POD, NEXT]), some.sampled_from([0.0, 150.0])),
    unique_by=lambda hold: hold.key,
)
held_ = some.lists(some.builds(held, units, some.sampled_from([POD, NEXT])), unique_by=lambda c: c.unit_id)


def applied(holds: Sequence[Hold], actions: Sequence[Action]) -> list[Hold]:
    """Carry the actions out on values."""
    now = {hold.key: hold for hold in holds}
    for action in actions:
        match action:
            case TakeOver(c, devices):
                now[c.unit_id] = grant(c.unit_id, devices[0], c.pod, 150.0)
            case Bind(c):
                now[c.unit_id] = replace(now[c.unit_id], pod=c.pod)
            case Release(unit):
                del now[unit]
            case Move(unit, devices, _):
                now[unit] = replace(now[unit], devices=devices)
    return list(now.values())


@given(holds_, held_, some.dictionaries(units, some.tuples(units)), some.sets(units), some.dictionaries(units, units))
def test_once_settled_nothing_more_is_done_and_kubelet_is_obeyed(
    holds: list[Hold],
    held_units: list[HeldUnit],
    offered: dict[str, tuple[str]],
    attached: set[str],
    moved: dict[str, str],
) -> None:
    facts: dict[str, Any] = {"offered": offered, "attached": attached, "moved": moved}
    actions = decided(holds, held_units, **facts)
    after = applied(holds, actions)
    held = {hold.key: hold for hold in after}
    for c in held_units:
        if c.unit_id in held:
            holder = held[c.unit_id].pod
            assert holder is not None
            assert (holder.namespace, holder.name) == (c.pod.namespace, c.pod.name)
        else:
            assert c.unit_id not in offered
    freed = {a.unit_id for a in actions if isinstance(a, Release)}
    assert freed.isdisjoint(c.unit_id for c in held_units)
    assert all(hold.device not in attached for hold in holds if hold.key in freed)
    followed = [a.devices for a in actions if isinstance(a, Move) and a.reason == "renumbered"]
    assert len(followed) == len(set(followed))
    again = [a for a in decided(after, held_units, **facts) if not isinstance(a, Move) or a.reason != "renumbered"]
    assert again == []
