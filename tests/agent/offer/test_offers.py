"""Offers one after the other: what is read of the books for them, what is listed on, and what changes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config import HealthSettings, RailNic, Resource, Select
from agent.health_history import HealthHistory
from agent.model.allocation import Claim, ClaimRef, ClaimState, Undo
from agent.model.device import MigDevice, Snapshot
from agent.model.health import HEALTHY, Health, Reason, unhealthy
from agent.model.unit_id import slot_id
from agent.offer.offer import HealthChange, Unit, health_changes
from agent.offer.offer import Units as UnitsByName
from agent.offer.offers import Offers, differs_in_pods_only, read
from agent.offer.units import Reading, with_profiles
from deviceplugin.server import Units, post
from tests.node import attach, change, claimed, gpu_uuid, granted, netdev, node, open_books, without

PF, VF = "0000:12:00.0", "0000:12:00.1"
RESOURCES = (Resource("rdma/hca", "hca", shares=4), Resource("rdma/vf", "vf"), Resource("nvidia.com/gpu", "gpu"))
BOOKS = Reading()
SMALL = node(rails=2, vfs=1)


def offers() -> Offers:
    return Offers(HealthHistory(HealthSettings(0, 0, 0)), time.monotonic)


def in_a_pod(snapshot: Snapshot) -> Snapshot:
    return change(snapshot, VF, netdevs=())


def test_a_vf_that_goes_into_a_pod_and_comes_back_leaves_the_lists_as_they_are() -> None:
    made = offers()
    first, second, third = (made.make(RESOURCES, snapshot, BOOKS) for snapshot in (node(), in_a_pod(node()), node()))
    assert first.units == second.units == third.units


@pytest.mark.parametrize(
    ("resource", "unit"),
    [
        (RESOURCES[1], VF),
        (Resource("rdma/vf", "vf", binding="late"), slot_id("rdma/vf", 0, 0)),
        (Resource("rdma/rail", "rail", nic=RailNic("vf")), f"rail-{gpu_uuid(0)}"),
    ],
)
def test_what_is_granted_stays_healthy(tmp_path: Path, resource: Resource, unit: str) -> None:
    with open_books(tmp_path) as books:
        books.grant(granted(resource.name, {unit: (VF,)}))
        offer = offers().make((resource,), SMALL, read(books, with_names=False))
    assert {each.health for each in offer.units[resource.name]} == {HEALTHY}


def test_vfs_of_an_adapter_that_a_pod_has_whole_are_for_no_other_pod() -> None:
    made, snapshot = offers(), node(rails=2, vfs=1)
    before = made.make(RESOURCES, snapshot, BOOKS)
    during = made.make(RESOURCES, snapshot, Reading(whole_adapters=frozenset({PF})))
    changed = {unit: (now.health.reason) for unit, now in during.by_id.items() if now != before.by_id[unit]}
    assert changed == {VF: "ParentDown"}
    after = made.make(RESOURCES, snapshot, BOOKS)
    assert after.units == before.units


@pytest.mark.parametrize(
    ("other", "is_beside_the_point"),
    [
        (in_a_pod(node()), True),
        (change(in_a_pod(node()), "0000:22:00.2", netdevs=(netdev("net1"),)), True),
        (change(node(), VF, netdevs=(replace(netdev("rail0v0"), is_enslaved=True),)), False),
        (change(node(), PF, netdevs=()), False),
        (change(node(), VF, driver=None), False),
        (change(node(), VF, rdma_devices=node().by_address[PF].rdma_devices), False),
        (without(node(), VF), False),
        (node(rails=3), False),
    ],
)
def test_only_interfaces_of_vfs_are_beside_the_point(other: Snapshot, is_beside_the_point: bool) -> None:
    before = node()
    shared = Snapshot(  # as the inventory publishes: what did not change is the same object
        tuple(d if (d := before.by_address.get(o.address)) == o and d is not None else o for o in other.devices),
        other.gpus if other.gpus != before.gpus else before.gpus,
        rdma_cm=True,
    )
    assert differs_in_pods_only(before, shared) is is_beside_the_point


def test_a_device_that_is_gone_stays_listed_though_slices_of_a_gpu_make_another_resource() -> None:
    made, later = Offers(HealthHistory(), time.monotonic), without(SMALL, VF)
    made.make(RESOURCES, SMALL, BOOKS)
    slices = Resource("nvidia.com/mig-1g.10gb", "gpu", mig_profile="1g.10gb", derived_from="nvidia.com/gpu")
    for resources in (RESOURCES, (*RESOURCES, slices)):
        offer = made.make(resources, later, BOOKS)
        assert offer.by_id[VF].health.reason == "DeviceGone"
    other = (RESOURCES[0], Resource("rdma/vf", "vf", select=Select(vendors=(0x15B3,))))
    offer = made.make(other, later, BOOKS)
    assert VF not in offer.by_id


@pytest.mark.parametrize(
    ("nic", "later", "reason"),
    [
        (RailNic("vf"), replace(SMALL, gpus=SMALL.gpus[1:]), "DeviceGone"),
        (RailNic("vf"), replace(SMALL, gpus=()), "DeviceGone"),
        (RailNic("vf", Select(drivers=("mlx5_core",))), change(SMALL, VF, driver="vfio-pci"), "WrongDriver"),
        (RailNic("vf", Select(drivers=("mlx5_core",))), change(SMALL, VF, driver=None), "NoDriver"),
        (RailNic("hca", shares=1), change(SMALL, PF, rdma_devices=()), "NoRdmaDevice"),
    ],
)
def test_a_rail_that_has_lost_a_half_is_listed_with_the_reason(nic: RailNic, later: Snapshot, reason: str) -> None:
    made, rails = Offers(HealthHistory(), time.monotonic), (Resource("rdma/rail", "rail", nic=nic),)
    before = made.make(rails, SMALL, BOOKS)
    after = made.make(rails, later, BOOKS)
    first = before.units["rdma/rail"][0]
    assert (first.gpu, first.health.reason) == (gpu_uuid(0), "")
    assert after.by_id[first.unit_id].health.reason == reason


def test_the_nic_of_a_rail_that_has_lost_its_gpu_is_offered_with_another_once_its_pod_has_ended() -> None:
    made, rails = Offers(HealthHistory(), time.monotonic), (Resource("rdma/rail", "rail", nic=RailNic("vf")),)
    later, lost = without(replace(SMALL, gpus=SMALL.gpus[1:]), "0000:22:00.1"), f"rail-{gpu_uuid(0)}"
    in_use = Reading(holders={VF: "rdma/rail", gpu_uuid(0): "rdma/rail"}, kept={lost: (VF,)})
    before = made.make(rails, later, in_use)  # of an agent that has started since
    assert before.units["rdma/rail"] == ()
    after = made.make(rails, later, BOOKS)
    assert [(unit.gpu, unit.device) for unit in after.units["rdma/rail"]] == [(gpu_uuid(1), VF)]


@pytest.mark.parametrize(
    ("resource", "listed"),
    [
        (Resource("nvidia.com/gpu", "gpu", mig="mixed"), {"MIG-1": "", "MIG-2": ""}),
        (Resource("nvidia.com/gpu", "gpu", mig="single"), {"MIG-1": "Held", "MIG-2": ""}),
        (Resource("a.b/gpu", "gpu", mig="mixed"), {"MIG-1": "Held", "MIG-2": ""}),
        (Resource("nvidia.com/gpu", "gpu"), {gpu_uuid(0): "Held"}),
        (Resource("a.b/rail", "rail", nic=RailNic("vf")), {f"rail-{gpu_uuid(0)}": "Held"}),
    ],
    ids=["as before", "as its GPU's own", "under another name", "with its GPU", "with its rail"],
)
def test_a_slice_in_use_is_withheld_under_any_name_but_its_own(resource: Resource, listed: dict[str, str]) -> None:
    parts = tuple(MigDevice(f"MIG-{n}", "1g.10gb", n, 0, 10 << 30) for n in (1, 2))
    whole = node(rails=1)
    cut = replace(whole, gpus=(replace(whole.gpus[0], mig_mode=True, mig_devices=parts),))
    books = Reading(holders={"MIG-1": "nvidia.com/mig-1g.10gb"})
    offer = offers().make(with_profiles([resource], cut, ()), cut, books)
    assert {unit.unit_id: unit.health.reason for units in offer.units.values() for unit in units} == listed


def test_kubelet_is_told_nothing_where_nothing_changes_for_it() -> None:
    maker, units, snapshot = offers(), Units(()), node(rails=4, vfs=4)
    late = Resource("rdma/vf", "vf", binding="late")
    slot, (first, *_, last) = slot_id(late.name, 0, 0), [d.address for d in snapshot.devices if d.is_vf]
    for held, version in (({}, 1), ({slot: first}, 1), ({slot: last}, 2)):
        offer = maker.make((late,), snapshot, Reading(slots=held))
        post(units, offer.units[late.name])
        assert units.version == version


@pytest.mark.parametrize(("mode", "expected"), [("nic", {"0000:3b:00.0"}), ("vf", set())])
def test_adapters_that_are_in_pods_are_told_from_vfs(tmp_path: Path, mode: str, expected: set[str]) -> None:
    device, undo = "0000:3b:00.0", Undo("ens1f0", "02:00:00:00:01:00", 1500, False, mode=mode)
    with open_books(tmp_path) as books:
        attach(books, device, undo=undo)
        assert read(books, with_names=False).whole_adapters == expected


def test_devices_of_claims_are_in_use_and_those_that_are_only_looked_at_are_not(tmp_path: Path) -> None:
    found = [
        claimed("vf", "node", "vf-0", "rdma/vf", "vf", "0000:3b:00.1", "u-0"),
        claimed(
            "hca", "node", "hca-0", "rdma/hca", "hca", "0000:3b:00.0", "u-1", share_id="s", exclusive=False, shares=2
        ),
        claimed("look", "node", "vf-1", "rdma/vf", "vf", "0000:3b:00.2", "u-2", exclusive=False, admin=True),
    ]
    shares = {"hca-0c42a10300651234-0": "0000:3b:00.0", "hca-0c42a10300651235-0": "0000:5e:00.0"}
    with open_books(tmp_path) as books:
        books.prepare_claim(Claim(ClaimRef("u", "ns", "c"), ClaimState.PREPARING, tuple(found)))
        books.grant(granted("rdma/hca", shares))
        assert read(books, with_names=False).shares_granted == {"hca-0c42a10300651234-0"}
        books.release(shares)
        reading = read(books, with_names=False)
    assert reading.holders == {"0000:3b:00.1": "rdma/vf", "0000:3b:00.0": "rdma/hca"}
    assert reading.forms == {"0000:3b:00.1": ("rdma/vf", "claim")}
    assert reading.granted == {}
    assert (reading.shares_claimed, reading.shares_granted) == ({"0000:3b:00.0": 2}, frozenset())


LINK, QUARANTINED = unhealthy(Reason.LINK_DOWN), unhealthy(Reason.QUARANTINED)


def a_unit(unit_id: str, health: Health, device: str) -> Unit:
    return Unit(unit_id, "rdma/vf", "vf", device, health, 0)


def units_of(*healths: Health) -> UnitsByName:
    return {"rdma/vf": [a_unit(f"unit-{n}", health, f"vf-{n}") for n, health in enumerate(healths)]}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            units_of(HEALTHY, HEALTHY, HEALTHY),
            units_of(LINK, QUARANTINED, LINK),
            [("LinkDown", False, ("vf-0", "vf-2")), ("Quarantined", False, ("vf-1",))],
        ),
        (
            units_of(LINK, HEALTHY),
            units_of(HEALTHY, LINK),
            [("LinkDown", False, ("vf-1",)), ("LinkDown", True, ("vf-0",))],
        ),
        (units_of(LINK), units_of(QUARANTINED), [("Quarantined", False, ("vf-0",))]),
        (units_of(LINK, HEALTHY), units_of(LINK, HEALTHY), []),
        ({}, units_of(HEALTHY), []),
        ({}, units_of(LINK), [("LinkDown", False, ("vf-0",))]),
        (units_of(LINK), {"rdma/vf": []}, []),
        ({}, {"rdma/vf": [a_unit("slot-1", LINK, "")]}, [("LinkDown", False, ("slot-1",))]),
    ],
    ids=["reasons", "recovery last", "another reason", "as before", "new", "new and ill", "gone", "without a device"],
)
def test_what_became_ill_or_well_is_told_once_for_each_reason(
    before: UnitsByName, after: UnitsByName, expected: list[tuple[str, bool, tuple[str, ...]]]
) -> None:
    assert list(health_changes(before, after)) == [HealthChange("rdma/vf", *each) for each in expected]
