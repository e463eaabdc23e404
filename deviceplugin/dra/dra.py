"""The DRA driver, put together: what is offered, the door for kubelet, and what answers there.

It serves for as long as any resource is offered to claims, and until the last claim is unprepared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from agent.config import Config
from agent.edits.claim_specs import ClaimSpecs
from agent.ledger import Ledger
from agent.model.lldp import Neighbour
from agent.offer.offer import Offer
from agent.state import Latest
from deviceplugin.dra.door import Door, Driver
from deviceplugin.dra.holders import ClaimReader, Healer, Holders
from deviceplugin.dra.metadata import ClaimFiles
from deviceplugin.dra.offering import Offering
from deviceplugin.dra.planner import Planner
from deviceplugin.dra.pod_gpus import GpuAsker, Kubelet, Objects
from deviceplugin.dra.pod_groups import PodGroups
from deviceplugin.dra.preparer import Allocations, Preparer
from deviceplugin.dra.told import Observer, ToldClaims
from deviceplugin.server import Observe


@dataclass(frozen=True, slots=True)
class Cells:
    """What the driver follows."""

    config: Latest[Config]
    offer: Latest[Offer]
    dropped: Latest[frozenset[str]]
    """What the cluster drops of slices."""
    leaves: Latest[Mapping[str, Neighbour]]
    """The switch port at the end of each adapter's link."""


@dataclass(frozen=True, slots=True)
class Others:
    """Whom the driver asks."""

    reader: ClaimReader
    objects: Objects
    kubelet: Kubelet
    healer: Healer


class DraDriver:
    """One driver on one node. Nothing of it is open before `run`."""

    def __init__(
        self, driver: Driver, cells: Cells, ledger: Ledger, others: Others, observe: Observe, observer: Observer
    ) -> None:
        """`observe` times calls, `observer` hears of those that fail."""
        config = cells.config
        self.offering = Offering(config, cells.offer, cells.dropped, driver.pool, cells.leaves)
        """The slices that there should be, and the devices in them."""
        catalog = self.offering.catalog
        gpus = GpuAsker(others.kubelet, others.objects)
        self._preparer = Preparer(
            Allocations(others.reader, PodGroups(others.kubelet, others.objects), driver.name, driver.pool),
            Planner(config, cells.offer, catalog, ledger, gpus, others.objects),
            ledger,
            ClaimFiles(ClaimSpecs(config.value.cdi_dir), config, catalog, self.offering.facts),
            Holders(ledger, others.reader, others.kubelet, others.healer),
        )
        self.door = Door(driver, ToldClaims(self._preparer, observer), catalog, observe)

    async def run(self) -> None:
        """Serve until closed."""
        following = asyncio.create_task(self.offering.run(), name="DRA offer")
        try:
            await self.door.run()
        finally:
            following.cancel()
            await asyncio.wait((following,))

    def close(self) -> None:
        """Make `run` end. Claims stay prepared."""
        self.door.close()
