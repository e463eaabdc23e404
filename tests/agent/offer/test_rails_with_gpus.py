"""Rails: which NICs each GPU has, and that a granted rail keeps them, alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config import RailNic, Resource, Select
from agent.health_history import HealthHistory
from agent.ledger import Ledger
from agent.model.device import Snapshot
from agent.model.health import Reason
from agent.offer.offer import Offer, Unit
from agent.offer.offers import Offers, read
from agent.offer.rails import planes_in
from agent.offer.selection import assign
from agent.offer.units import Inputs, Reading, make_offer, plain_offer
from agent.placement import Distances, choose_sets
from tests.node import change, gpu_uuid, granted, node, open_books, recorded_node, split, without

P5 = Resource("a.b/rail", "rail", nic=RailNic("hca", Select(vendors=(0x1D0F,)), shares=1, count=4))
PAIR = Resource("rdma/rail", "rail", nic=RailNic("vf", count=2))


def rails(resource: Resource, snapshot: Snapshot, kept: Mapping[str, tuple[str, ...]] = {}) -> tuple[Unit, ...]:
    inputs = Inputs([resource], snapshot, assign([resource], snapshot), Reading(kept=kept))
    return make_offer(inputs).units[resource.name]


def sets(found: tuple[Unit, ...]) -> dict[str, tuple[str, ...]]:
    return {unit.unit_id: unit.devices for unit in found}


@pytest.mark.parametrize("shares", [1, 2, 63])
def test_each_gpu_of_a_p5_has_the_four_adapters_beside_it(shares: int) -> None:
    snapshot = recorded_node("p5-8gpu-32efa")
    distances = Distances(snapshot)
    found = rails(replace(P5, nic=replace(P5.nic, shares=shares)), snapshot)
    assert [unit.gpu for unit in found] == list(distances.gpus)
    assert [len(unit.devices) for unit in found] == [4] * 8
    assert set(Counter(nic for unit in found for nic in unit.devices).values()) == {1}
    adapters = [device.address for device in snapshot.devices if device.vendor == 0x1D0F and device.rdma_devices]
    for unit in found:
        own = sorted(distances.span(unit.gpu, nic) for nic in unit.devices)
        assert own == sorted(distances.span(unit.gpu, nic) for nic in adapters)[:4]


def test_shares_let_each_of_eight_gpus_have_two_of_eight_adapters_evenly() -> None:
    nics = RailNic("hca", Select(vendors=(0x15B3,)), count=2)
    found = rails(Resource("a.b/rail", "rail", nic=nics), recorded_node("h100-8gpu"))
    assert [len(set(unit.devices)) for unit in found] == [2] * 8
    assert set(Counter(nic for unit in found for nic in unit.devices).values()) == {2}


PLANES = split(node(rails=4, vfs=0), 2, vfs=3)
FAR = ["22:01.0", "22:02.0", "22:02.1", "22:01.1"]
"""VFs of the adapter beside the second GPU."""


@pytest.mark.parametrize("kind", ["vf", "hca", "nic"])
@pytest.mark.parametrize(("count", "planes"), [("planes", 2), (2, 2), ("planes", 4), (4, 4), ("planes", 1)])
def test_a_rail_takes_one_nic_of_each_plane_of_the_adapter_beside_its_gpu(
    kind: str, count: int | str, planes: int
) -> None:
    snapshot = split(node(rails=4, vfs=0), planes, vfs=3 if kind == "vf" else 0)
    found = rails(Resource("rdma/rail", "rail", nic=RailNic(kind, shares=2, count=count)), snapshot)
    assert ports_of(found, snapshot) == [
        Counter(f"0000:{bus}:00.{plane}" for plane in range(planes)) for bus in (12, 22, 32, 42)
    ]


def ports_of(units: tuple[Unit, ...], snapshot: Snapshot) -> list[Counter[str]]:
    return [Counter(snapshot.by_address[nic].physfn or nic for nic in unit.devices) for unit in units]


def test_four_vfs_of_two_planes_are_two_of_each() -> None:
    found = rails(Resource("rdma/rail", "rail", nic=RailNic("vf", count=4)), PLANES)
    assert ports_of(found, PLANES) == [{f"0000:{bus}:00.{p}": 2 for p in (0, 1)} for bus in (12, 22, 32, 42)]


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [
        # Of the first GPU's adapter one plane has no VF left.
        (["12:01.0", *FAR], None, [("22:01.0", "22:02.0"), ("22:01.1", "22:02.1")]),
        (["12:01.0", *FAR], 2, [("22:01.0", "22:02.0"), ("22:01.1", "22:02.1")]),
        (["12:01.0", *FAR[:3]], None, [None, ("22:01.0", "22:02.0")]),
        (["12:01.0", *FAR[:3]], 2, [("12:01.0", "22:02.1"), ("22:01.0", "22:02.0")]),
    ],
)
def test_a_set_mixes_planes_of_two_adapters_only_if_it_must(
    free: list[str], count: int | None, expected: list[tuple[str, str] | None]
) -> None:
    gpus = [gpu_uuid(0), gpu_uuid(1)]
    room, planes = {f"0000:{nic}": 1 for nic in free}, planes_in(plain_offer([], PLANES).rails)
    found = choose_sets(Distances(PLANES), gpus, room, count, planes)
    assert [found.get(gpu) for gpu in gpus] == [mine and tuple(f"0000:{nic}" for nic in mine) for mine in expected]


def test_a_rail_whose_adapter_misses_a_plane_is_none_until_it_is_back(tmp_path: Path) -> None:
    of_planes, maker = replace(PAIR, nic=RailNic("vf", count="planes")), Offers(HealthHistory(), time.monotonic)
    whole = split(node(rails=4, vfs=0), 2, vfs=1)
    without_plane = without(whole, "0000:22:00.1", "0000:22:02.0")
    with open_books(tmp_path) as books:
        for snapshot, ill in ((whole, []), (without_plane, [f"rail-{gpu_uuid(1)}"]), (whole, [])):
            made = listed(maker, of_planes, snapshot, books)
            assert [len(unit.devices) for unit in made.units[of_planes.name]] == [2] * 4
            assert [unit.unit_id for unit in made.units[of_planes.name] if not unit.health.healthy] == ill


def test_a_gpu_that_does_not_find_all_its_nics_makes_no_rail() -> None:
    snapshot = recorded_node("p5-8gpu-32efa")
    whole = rails(P5, snapshot)
    gone = rails(P5, without(snapshot, whole[2].devices[1]))
    assert sets(gone) == {unit_id: its for unit_id, its in sets(whole).items() if unit_id != whole[2].unit_id}
    assert rails(replace(PAIR, nic=RailNic("vf", count=5)), node(rails=1, vfs=4)) == ()
    assert rails(replace(PAIR, nic=RailNic("hca", count=2)), node(rails=1)) == ()


def rails_with_doubt(resource: Resource, snapshot: Snapshot, device: str) -> tuple[Unit, ...]:
    books = Reading(quarantined={device: "in doubt"})
    return make_offer(Inputs([resource], snapshot, assign([resource], snapshot), books)).units[resource.name]


@pytest.mark.parametrize("position", range(4))
def test_a_rail_is_as_ill_as_any_of_its_nics(position: int) -> None:
    snapshot = recorded_node("p5-8gpu-32efa")
    ill = rails(P5, snapshot)[3].devices[position]
    made = rails_with_doubt(P5, snapshot, ill)
    assert [unit.health.reason for unit in made] == [*[""] * 3, "Quarantined", *[""] * 4]


def test_a_quarantined_nic_counts_before_all_that_lets_a_rail_be_granted() -> None:
    snapshot = node(rails=1, vfs=2)
    (unit,) = rails(PAIR, snapshot)
    sick = change(snapshot, unit.devices[0], driver=None)
    sick = replace(sick, gpus=tuple(replace(gpu, ailments=("GpuLost",)) for gpu in sick.gpus))
    (found,) = rails_with_doubt(PAIR, sick, unit.devices[1])
    assert found.health.reason == Reason.QUARANTINED


@pytest.mark.parametrize("position", range(2))
def test_a_granted_rail_that_misses_a_nic_keeps_its_set_and_is_ill(position: int) -> None:
    snapshot = node(rails=2, vfs=4)
    held = sets(rails(PAIR, snapshot))
    unit = f"rail-{gpu_uuid(0)}"
    found = {u.unit_id: u for u in rails(PAIR, without(snapshot, held[unit][position]), {unit: held[unit]})}
    assert found[unit].devices == held[unit]
    assert found[unit].health.reason == Reason.DEVICE_GONE
    assert found[f"rail-{gpu_uuid(1)}"].health.healthy


def listed(maker: Offers, resource: Resource, snapshot: Snapshot, books: Ledger) -> Offer:
    return maker.make((resource,), snapshot, read(books, with_names=False))


def test_another_number_is_for_rails_that_nobody_has(tmp_path: Path) -> None:
    snapshot, one = node(rails=2, vfs=4), replace(PAIR, nic=RailNic("vf"))
    unit, maker = f"rail-{gpu_uuid(0)}", Offers(HealthHistory(), time.monotonic)
    with open_books(tmp_path) as books:
        (held, _) = rails(one, snapshot)
        books.grant(granted(one.name, {unit: held.devices}))
        made = listed(maker, PAIR, snapshot, books)
        assert [len(u.devices) for u in made.units[PAIR.name]] == [1, 2]
        books.release([unit])
        made = listed(maker, PAIR, snapshot, books)
        assert [len(u.devices) for u in made.units[PAIR.name]] == [2, 2]


RAIL = Resource("rdma/rail", "rail", nic=RailNic("vf"))
SHARED = replace(RAIL, nic=RailNic("hca", shares=2))


def pairs(resource: Resource, snapshot: Snapshot, **kept: str) -> dict[str, str]:
    return {unit.gpu: unit.device for unit in rails(resource, snapshot, {rail: (nic,) for rail, nic in kept.items()})}


def test_a_granted_rail_keeps_its_nic_when_hardware_comes_or_goes() -> None:
    snapshot = node(rails=2, vfs=2)
    (first, second) = (snapshot.devices[1].address, snapshot.devices[2].address)
    assert pairs(RAIL, snapshot)[gpu_uuid(0)] == first
    kept = {f"rail-{gpu_uuid(0)}": second}
    assert pairs(RAIL, snapshot, **kept)[gpu_uuid(0)] == second
    assert pairs(RAIL, without(snapshot, first), **kept)[gpu_uuid(0)] == second
    assert pairs(RAIL, without(snapshot, second), **kept)[gpu_uuid(0)] == first
    assert pairs(RAIL, snapshot, **{"rail-GPU-of-before": second}) == pairs(RAIL, snapshot)
