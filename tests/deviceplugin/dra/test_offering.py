"""Slices and catalog follow offer and configuration, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace

from agent.config import Config
from agent.hardware.lldp import Neighbour
from agent.health_history import HealthHistory
from agent.model.device import Snapshot
from agent.offer.offer import Offer
from agent.offer.offers import Offers
from agent.offer.units import Reading, plain_offer
from agent.state import Latest
from deviceplugin.dra.offering import Offering
from tests.awaiting import until
from tests.deviceplugin.dra.nodes import HCA, NIC, NODE, VF, late, value
from tests.node import change, node, without

PF, FIRST = "0000:12:00.0", "0000:12:00.1"


@dataclass
class World:
    config: Latest[Config]
    offer: Latest[Offer] = field(default_factory=lambda: Latest(Offer()))
    dropped: Latest[frozenset[str]] = field(default_factory=lambda: Latest(frozenset()))
    leaves: Latest[Mapping[str, Neighbour]] = field(default_factory=lambda: Latest({}))
    offers: Offers = field(default_factory=lambda: Offers(HealthHistory(), lambda: 0.0))

    def show(self, snapshot: Snapshot, books: Reading | None = None) -> None:
        """Make the offer of a snapshot."""
        self.offer.set(self.offers.make(self.config.value.resources, snapshot, books or Reading()))


@contextlib.asynccontextmanager
async def following(world: World, snapshot: Snapshot | None = None) -> AsyncIterator[Offering]:
    """Follow a world, of which slices have told the snapshot if there is one."""
    offering = Offering(world.config, world.offer, world.dropped, NODE, world.leaves)
    running = asyncio.create_task(offering.run())
    try:
        if snapshot is not None:
            world.show(snapshot)
            await until(lambda: offering.slices.value)
        yield offering
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def settled(offering: Offering) -> tuple[int, int]:
    """Wait until what was set has been looked at; tell how often the cells were set."""
    await asyncio.sleep(0.05)
    return offering.catalog.version, offering.slices.version


async def test_nothing_is_said_before_the_first_scan_and_before_it_is_known_what_is_near_to_what() -> None:
    world = World(Latest(Config(resources=(VF,))))
    async with following(world) as offering:
        assert await settled(offering) == (0, 0)
        assert offering.slices.value is None
        world.show(replace(node(rails=2, vfs=2), adapter_ids_due=True))
        assert await settled(offering) == (0, 0)
        world.show(node(rails=2, vfs=2))
        await until(lambda: offering.slices.value)
        assert len(offering.catalog.value) == 4
        world.show(replace(node(rails=2, vfs=1), adapter_ids_due=True))
        await until(lambda: len(offering.catalog.value) == 2)


async def test_a_node_without_devices_wants_no_slices() -> None:
    world = World(Latest(Config(resources=(VF,))))
    async with following(world) as offering:
        world.show(node(rails=1, vfs=0))
        await until(lambda: offering.slices.value == ())


async def test_pods_that_come_and_go_are_no_news() -> None:
    resources = (VF, late(replace(NIC, name="rdma/nic")), replace(HCA, name="rdma/hca"))
    world = World(Latest(Config(resources=resources)))
    before = node(rails=2, vfs=3)
    async with following(world, before) as offering:
        said = await settled(offering)
        taken = change(before, FIRST, netdevs=())
        for snapshot in (taken, change(taken, PF, netdevs=()), before):
            holders = {FIRST: "rdma/vf"} if snapshot is not before else {}
            world.show(snapshot, Reading(holders=holders))
            await settled(offering)
        assert await settled(offering) == said


async def test_a_fault_is_said_and_taken_back() -> None:
    world = World(Latest(Config(resources=(VF,))))
    before = node(rails=1, vfs=1)
    async with following(world, before) as offering:
        first = offering.slices.value
        world.show(change(before, FIRST, driver=None))
        await until(lambda: offering.catalog.value[0].taints)
        assert offering.slices.value != first
        world.show(before)
        await until(lambda: offering.slices.value == first)


async def test_an_offer_of_the_former_configuration_is_not_mixed_with_the_new_one() -> None:
    world = World(Latest(Config(resources=(VF,))))
    snapshot = node(rails=1, vfs=2)
    async with following(world, snapshot) as offering:
        said = await settled(offering)
        world.config.set(replace(world.config.value, resources=(VF, HCA)))
        assert await settled(offering) == said
        world.show(snapshot)
        await until(lambda: len(offering.catalog.value) == 3)


async def test_what_the_cluster_drops_changes_the_slices_alone() -> None:
    world = World(Latest(Config(resources=(VF, HCA))))
    async with following(world, node(rails=1, vfs=2)) as offering:
        world.dropped.set(frozenset({"capacity"}))
        await until(lambda: offering.slices.value and len(offering.slices.value[0]["spec"]["devices"]) == 2)
        assert len(offering.catalog.value) == 3


async def test_an_adapter_that_falls_off_the_bus_moves_no_other_device_while_it_is_missed() -> None:
    world = World(Latest(Config(resources=(late(VF),))))
    before = node(rails=2, vfs=2)
    async with following(world, before) as offering:
        other = [d for d in offering.catalog.value if value(d, "nearGpu") == before.gpus[1].uuid]
        gone = without(before, PF, FIRST, "0000:12:00.2")
        held = Reading(holders={FIRST: "rdma/vf"})
        world.show(gone, held)
        await until(lambda: any(device.taints for device in offering.catalog.value))
        [place] = [device for device in offering.catalog.value if device.taints]
        assert (place.taints[0].key, [unit.device for unit in place.units]) == ("nodefabric.io/DeviceGone", [FIRST])
        assert value(place, "nearGpu") == before.gpus[0].uuid
        assert [device for device in offering.catalog.value if device is not place] == other


async def test_gpus_whose_driver_is_replaced_keep_their_places() -> None:
    world = World(Latest(Config(resources=(late(VF),))))
    before = node(rails=2, vfs=2)
    async with following(world, before) as offering:
        said = await settled(offering)
        world.show(replace(before, gpus=(), generation=2))
        assert await settled(offering) == said
        gpu = before.gpus[0].pci_address
        world.offer.set(plain_offer([late(VF)], replace(without(before, gpu), gpus=before.gpus[1:])))
        await until(lambda: offering.catalog.version > said[0])
        assert {value(device, "nearGpu") for device in offering.catalog.value} == {before.gpus[1].uuid, None}
