"""Which grants are taken over, bound, freed or moved. Kubelet's word decides, and nothing in a pod is freed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from agent.kubelet.podresources import HeldUnit
from agent.model.allocation import Grant, PodRef, UnitSpec, all_of
from agent.reconcile.grants import Action, Bind, Ended, Move, Release, TakeOver, decide

A, B, C = "0000:3b:00.2", "0000:3b:00.3", "0000:3b:00.4"
POD, NEXT = PodRef("default", "a", "uid"), PodRef("default", "b")


def grant(unit: str, device: str | None = None, pod: PodRef | None = POD, at: float = 0.0) -> Grant:
    return Grant(unit, "rdma/vf", device or unit, at, pod)


def held(unit: str, pod: PodRef = POD) -> HeldUnit:
    return HeldUnit(pod, "rdma/vf", unit)


def decided(
    grants: Sequence[Grant] = (),
    held_units: Sequence[HeldUnit] = (),
    offered: Mapping[str, str] | None = None,
    attached: Collection[str] = (),
    moved: Mapping[str, str] | None = None,
    ended: Sequence[Ended] = (),
    noted: Collection[str] = (),
) -> tuple[Action, ...]:
    return decide(
        *(grants, held_units),
        offered=offered,
        attached=attached,
        moved=moved or {},
        asked_at=160.0,
        unclaimed_before=100.0,
        ended=ended,
        noted=noted,
    )


def test_what_fits_is_left_alone() -> None:
    assert decided([grant(A)], [held(A)], {A: A}) == ()


def test_a_unit_that_a_pod_has_is_taken_over_once_it_is_offered() -> None:
    assert decided([], [held(A)], None) == ()
    assert decided([], [held(A)], {}) == ()
    assert decided([], [held(A)], {A: A}) == (TakeOver(held(A), A),)


def test_a_unit_goes_to_the_pod_that_has_it_now() -> None:
    assert decided([grant(A, pod=None)], [held(A)]) == (Bind(held(A)),)
    assert decided([grant(A)], [held(A, NEXT)]) == (Bind(held(A, NEXT)),)


def test_what_kubelet_said_before_a_unit_was_granted_anew_is_of_another_pod() -> None:
    assert decided([grant(A, pod=NEXT, at=170.0)], [held(A)], {A: A}) == ()


def test_an_old_grant_that_no_pod_has_is_freed() -> None:
    assert decided([grant(A), grant(B, at=150.0)]) == (Release(A),)


def test_a_new_grant_is_freed_with_the_end_of_the_pod_that_had_it() -> None:
    new, other = grant(A, at=140.0), grant(B, at=140.0, pod=NEXT)
    assert decided([new, other], ended=[Ended(POD, 150.0)]) == (Release(A),)
    assert decided([new, other], ended=[Ended(PodRef("default", "a"), 150.0)]) == (Release(A),)


@pytest.mark.parametrize(
    ("held", "ended"),
    [
        (grant(A, at=140.0), Ended(NEXT, 150.0)),
        (grant(A, at=140.0), Ended(PodRef("default", "a", "uid of the pod before"), 150.0)),
        (grant(A, at=140.0, pod=None), Ended(POD, 150.0)),
        (grant(A, at=155.0), Ended(POD, 150.0)),  # the next pod of this name
        (grant(A, at=140.0), Ended(POD, 165.0)),  # after kubelet was asked
    ],
)
def test_a_new_grant_stays_unless_its_pod_ended_after_it_and_before_kubelet_was_asked(
    held: Grant, ended: Ended
) -> None:
    assert decided([held], ended=[ended]) == ()


def test_what_kubelet_counts_to_an_ended_pod_or_a_pod_has_attached_stays() -> None:
    new, ended = grant(A, at=140.0), Ended(POD, 150.0)
    assert decided([new], [held(A)], ended=[ended]) == ()
    assert decided([new], attached=[A], ended=[ended]) == ()


def test_the_grant_of_a_device_in_a_pod_stays() -> None:
    assert decided([grant(A)], attached=[A]) == ()


def test_a_unit_whose_address_is_gone_follows_its_vf() -> None:
    assert decided([grant(A)], [held(A)], {B: B}, moved={A: B}) == (Move(A, (B,), "renumbered"),)


def test_a_unit_that_is_offered_stays_where_kubelet_takes_it_to_be() -> None:
    """Its container was told this address, whichever card answers there now."""
    assert decided([grant(A)], [held(A)], {A: A, B: B}, moved={A: B, B: A}) == ()


def test_a_share_whose_adapter_has_moved_follows_it() -> None:
    assert decided([grant("hca-1-0", A)], [held("hca-1-0")], {"hca-1-0": B}) == (
        Move("hca-1-0", B, "offered-elsewhere"),
    )


def test_no_unit_follows_its_vf_to_where_another_pod_is() -> None:
    grants, held_units = [grant(A), grant(B, pod=NEXT)], [held(A), held(B, NEXT)]
    assert decided(grants, held_units, {B: B}, moved={A: B}) == ()
    assert decided([grant(A)], held_units, {B: B}, moved={A: B}) == (TakeOver(held(B, NEXT), B),)


def test_nothing_moves_before_it_is_known_what_is_offered() -> None:
    assert decided([grant(A)], [held(A)], None, moved={A: B}) == ()


def test_the_device_of_a_living_attachment_moves_nowhere() -> None:
    assert decided([grant(A)], [held(A)], {A: B}, attached=[A]) == ()


units = some.sampled_from([A, B, C, "hca-1-0"])
grants_ = some.lists(
    some.builds(grant, units, units, some.sampled_from([None, POD, NEXT]), some.sampled_from([0.0, 150.0])),
    unique_by=lambda g: g.unit_id,
)
held_ = some.lists(some.builds(held, units, some.sampled_from([POD, NEXT])), unique_by=lambda c: c.unit_id)


def applied(grants: Sequence[Grant], actions: Sequence[Action]) -> list[Grant]:
    """Carry the actions out on values."""
    from dataclasses import replace

    now = {g.unit_id: g for g in grants}
    for action in actions:
        match action:
            case TakeOver(c, device):
                now[c.unit_id] = grant(c.unit_id, all_of(device)[0], c.pod, 150.0)
            case Bind(c):
                now[c.unit_id] = replace(now[c.unit_id], pod=c.pod)
            case Release(unit):
                del now[unit]
            case Move(unit, device, _):
                now[unit] = replace(now[unit], device=all_of(device)[0])
    return list(now.values())


@given(grants_, held_, some.dictionaries(units, units), some.sets(units), some.dictionaries(units, units))
def test_once_settled_nothing_more_is_done_and_kubelet_is_obeyed(
    grants: list[Grant], held_units: list[HeldUnit], offered: dict[str, str], attached: set[str], moved: dict[str, str]
) -> None:
    facts: dict[str, Any] = {"offered": offered, "attached": attached, "moved": moved}
    actions = decided(grants, held_units, **facts)
    after = applied(grants, actions)
    held = {g.unit_id: g for g in after}
    for c in held_units:
        if c.unit_id in held:
            holder = held[c.unit_id].pod
            assert holder is not None
            assert (holder.namespace, holder.name) == (c.pod.namespace, c.pod.name)
        else:
            assert c.unit_id not in offered
    freed = {a.unit_id for a in actions if isinstance(a, Release)}
    assert freed.isdisjoint(c.unit_id for c in held_units)
    assert all(g.device not in attached for g in grants if g.unit_id in freed)
    followed = [a.devices for a in actions if isinstance(a, Move) and a.reason == "renumbered"]
    assert len(followed) == len(set(followed))
    again = [a for a in decided(after, held_units, **facts) if not isinstance(a, Move) or a.reason != "renumbered"]
    assert again == []


def test_what_an_init_container_has_keeps_its_spec_while_kubelet_notes_it() -> None:
    named = replace(
        grant(A, pod=None), spec=UnitSpec("hca", (A,), {"deviceNodes": [{"path": "/dev/infiniband/uverbs0"}]})
    )
    assert decided([named], [], {A: A}, noted={A}) == ()
    assert decided([named], [], {A: A}) == (Release(A),)
    assert decided([replace(named, pod=POD)], [], {A: A}, noted={A}) == (Release(A),)
