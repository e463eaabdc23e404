"""Offers as slots come and go: the short way leads to what the long way would have said."""

from __future__ import annotations

from agent.config import Resource
from agent.health import HealthBook
from agent.model.health import Reason
from agent.model.unit_id import slot_id
from agent.offer.books import Reading
from agent.offer.offer import Offer
from agent.offer.offers import Offers
from agent.offer.slots import NOTHING_HELD, Holdings
from deviceplugin.server import Units, post
from tests.deviceplugin.machines import change, node

RESOURCES = (Resource("rdma/vf", "vf", binding="late"), Resource("nvidia.com/gpu", "gpu"))
SNAPSHOT = node(rails=4, vfs=4)
VFS = [device.address for device in SNAPSHOT.devices if device.is_vf]
SLOT = slot_id("rdma/vf", 0, 0)


def offers() -> Offers:
    return Offers(HealthBook(), lambda: 0.0)


def made(maker: Offers, held: Holdings) -> Offer | None:
    return maker.make(RESOURCES, SNAPSHOT, Reading(held=held))


def test_another_use_of_slots_makes_the_lists_that_a_new_start_would_make() -> None:
    maker = offers()
    assert made(maker, NOTHING_HELD) is not None
    for held in (
        Holdings(frozenset({SLOT})),
        Holdings(frozenset({SLOT}), {SLOT: VFS[0]}),
        Holdings(frozenset({SLOT}), {SLOT: VFS[-1]}),  # of the other NUMA node: a slot moves over
        Holdings(frozenset({SLOT, slot_id("rdma/vf", 1, 99)})),
        NOTHING_HELD,
    ):
        short, long = made(maker, held), made(offers(), held)
        assert short is not None
        assert long is not None
        assert short.units == long.units
        assert short.by_id == long.by_id
        assert short.layouts["rdma/vf"].rank.keys() == long.layouts["rdma/vf"].rank.keys()
        assert short.pools == long.pools
        assert made(maker, held) is None


def test_slots_that_come_free_stay_withheld_while_the_books_cannot_be_written() -> None:
    health = HealthBook()
    maker = Offers(health, lambda: 0.0)
    made(maker, Holdings(frozenset({SLOT}), {SLOT: VFS[0]}))
    health.withhold(Reason.BOOKS_UNWRITABLE)
    for held in (Holdings(frozenset({SLOT}), {SLOT: VFS[0]}), Holdings(frozenset({SLOT})), NOTHING_HELD):
        offer = made(maker, held)
        assert offer is not None
        assert {unit.health.reason for unit in offer.units["rdma/vf"]} == {Reason.BOOKS_UNWRITABLE}
    health.withhold(None)
    offer = made(maker, NOTHING_HELD)
    assert offer is not None
    assert all(unit.health.healthy for unit in offer.units["rdma/vf"])


def test_new_hardware_is_seen_with_the_slots_in_use() -> None:
    maker = offers()
    held = Holdings(frozenset({SLOT}), {SLOT: VFS[0]})
    made(maker, NOTHING_HELD)
    made(maker, held)
    sick = change(SNAPSHOT, VFS[0], driver=None)
    offer = maker.make(RESOURCES, sick, Reading(held=held))
    assert offer is not None
    assert offer.by_id[SLOT].health.reason == "NoDriver"
    assert offer.snapshot is sick


def test_kubelet_is_told_nothing_where_nothing_changes_for_it() -> None:
    maker, units = offers(), Units(())
    for held, version in (
        (NOTHING_HELD, 1),
        (Holdings(frozenset({SLOT}), {SLOT: VFS[0]}), 1),
        (Holdings(frozenset({SLOT}), {SLOT: VFS[-1]}), 2),
    ):
        offer = made(maker, held)
        assert offer is not None
        post(units, offer.units["rdma/vf"])
        assert units.version == version
