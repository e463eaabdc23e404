"""Offers as slots come and go."""

from __future__ import annotations

from agent.config import Resource
from agent.health import HealthBook
from agent.model.unit_id import slot_id
from agent.offer.offer import Offer
from agent.offer.offers import Offers
from agent.offer.units import NOTHING_HELD, Holdings, Reading
from deviceplugin.server import Units, post
from tests.deviceplugin.machines import node

RESOURCES = (Resource("rdma/vf", "vf", binding="late"), Resource("nvidia.com/gpu", "gpu"))
SNAPSHOT = node(rails=4, vfs=4)
VFS = [device.address for device in SNAPSHOT.devices if device.is_vf]
SLOT = slot_id("rdma/vf", 0, 0)


def offers() -> Offers:
    return Offers(HealthBook(), lambda: 0.0)


def made(maker: Offers, held: Holdings) -> Offer:
    return maker.make(RESOURCES, SNAPSHOT, Reading(held=held))


def test_kubelet_is_told_nothing_where_nothing_changes_for_it() -> None:
    maker, units = offers(), Units(())
    for held, version in (
        (NOTHING_HELD, 1),
        (Holdings(frozenset({SLOT}), {SLOT: VFS[0]}), 1),
        (Holdings(frozenset({SLOT}), {SLOT: VFS[-1]}), 2),
    ):
        offer = made(maker, held)
        post(units, offer.units["rdma/vf"])
        assert units.version == version
