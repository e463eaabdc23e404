"""Resources that claims are for (DRA): their devices beside the units that kubelet counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.config import HealthSettings, Resource
from agent.health_history import HealthHistory
from agent.offer.offer import Offer
from agent.offer.offers import Offers
from agent.offer.units import Reading, plain_offer
from tests.node import node, without

VF = Resource("rdma/vf", "vf", offer="dra")
HCA = Resource("rdma/hca", "hca", shares=63, offer="dra")
PF, FIRST = "0000:12:00.0", "0000:12:00.1"
GONE_SECONDS = 5.0


def offers(clock: list[float]) -> Offers:
    return Offers(HealthHistory(HealthSettings(0, 0, GONE_SECONDS)), lambda: clock[0])


def test_claims_find_each_vf_and_kubelet_counts_none_of_them() -> None:
    offer = plain_offer([VF, Resource("nvidia.com/gpu", "gpu")], node(rails=2, vfs=2))
    assert set(offer.units) == {"nvidia.com/gpu"}
    assert [unit.device for unit in offer.claimable["rdma/vf"]] == [
        *("0000:12:00.1", "0000:12:00.2", "0000:22:00.1", "0000:22:00.2")
    ]
    assert FIRST not in offer.by_id
    assert set(offer.offered) == {"nvidia.com/gpu", "rdma/vf"}


def test_shares_that_pods_were_granted_before_are_counted_as_they_end() -> None:
    made, snapshot = offers([0.0]), node(rails=1)
    counts = []
    for number in (2, 1, 0):
        granted = {PF: number} if number else {}
        offer = made.make((HCA,), snapshot, Reading(holders=dict.fromkeys(granted, "rdma/hca"), granted=granted))
        counts.append(dict(offer.granted))
        assert all(unit.health.healthy for unit in offer.claimable["rdma/hca"])
    assert counts == [{PF: 2}, {PF: 1}, {}]


@pytest.mark.parametrize("binding", ["early", "late"])
def test_a_device_that_is_gone_is_told_for_a_while_and_as_long_as_a_pod_has_it(binding: str) -> None:
    clock, resources = [0.0], (replace(VF, binding=binding),)
    made, before = offers(clock), node(rails=1, vfs=2)
    made.make(resources, before, Reading())
    used = Reading(holders={FIRST: "rdma/vf"})

    def gone(offer: Offer) -> tuple[list[str], frozenset[str]]:
        ill = [u for u in offer.claimable["rdma/vf"] if not u.health.healthy]
        assert {u.health.reason for u in ill} <= {"DeviceGone"}
        return [u.device for u in ill], offer.lost

    after = without(before, FIRST, "0000:12:00.2")
    assert gone(made.make(resources, after, used)) == ([FIRST, "0000:12:00.2"], frozenset({FIRST}))
    clock[0] += GONE_SECONDS
    assert gone(made.make(resources, after, used)) == ([FIRST], frozenset({FIRST}))
    assert gone(made.make(resources, after, Reading())) == ([], frozenset())


def test_as_many_shares_as_claims_have_are_held_when_kubelet_is_offered_the_adapter_again() -> None:
    made, snapshot, resource = offers([0.0]), node(rails=1), replace(HCA, shares=4)
    back = (replace(resource, offer="devicePlugin"),)
    first = "hca-b83fd20300a00000-3"

    def held(resources: tuple[Resource, ...], books: Reading) -> list[str]:
        offer = made.make(resources, snapshot, books)
        return [unit.unit_id for unit in offer.units["rdma/hca"] if unit.health.reason == "Held"]

    assert made.make((resource,), snapshot, Reading()) is not None
    both = Reading(shares_claimed={PF: 2}, shares_granted=frozenset({first}))
    before = made.make((resource,), snapshot, Reading())
    assert made.make((resource,), snapshot, both) == before  # the slices follow claims by themselves
    assert held(back, both) == ["hca-b83fd20300a00000-1", "hca-b83fd20300a00000-2"]
    assert held(back, replace(both, shares_claimed={PF: 1})) == ["hca-b83fd20300a00000-2"]
    assert held(back, Reading(shares_claimed={PF: 9})) == [f"hca-b83fd20300a00000-{number}" for number in range(4)]
    assert held(back, Reading()) == []
