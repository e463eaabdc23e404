"""What the driver offers: devices and slices of each new offer, in cells.

The publisher follows the slices; kubelet's calls and the health stream look into the catalog.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Mapping

from agent.config import Config
from agent.hardware.lldp import Neighbour
from agent.offer.offer import Offer
from agent.state import Latest, first
from deviceplugin.dra.attributes import Facts, StableFacts, stable_facts
from deviceplugin.dra.devices import Document, DraDevice, devices_of, slices_of


class Offering:
    """Makes devices and slices of each new offer."""

    def __init__(
        self,
        config: Latest[Config],
        offer: Latest[Offer],
        dropped: Latest[frozenset[str]],
        node_name: str,
        leaves: Latest[Mapping[str, Neighbour]],
    ) -> None:
        """`dropped` is what the cluster drops of slices, `leaves` the switch port at the end of each adapter's link."""
        self._config = config
        self._offer = offer
        self._dropped = dropped
        self._node_name = node_name
        self._leaves = leaves
        self._stable = StableFacts()
        self._ground: tuple[object, ...] = ()
        """What the newest devices were made of. Kept, so that each stays the same object as long as it is the same."""
        self.catalog: Latest[tuple[DraDevice, ...]] = Latest(())
        """All devices, with what stands behind each, also those that the cluster cannot be told of."""
        self.facts = Latest(Facts(self._stable))
        """What their attributes are made of."""
        self.slices: Latest[tuple[Document, ...] | None] = Latest(None)
        """The slices that there should be; None as long as that is not known."""
        self._heeded = Latest(-1)
        """The version of the leaves that the newest slices are made of."""

    async def heeds(self, leaves: int) -> None:
        """Wait until the slices are made of this version of the leaves, or a later one."""
        while (now := self._heeded.value) < leaves:
            await self._heeded.other_than(now)

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            config, offer = self._config.value, self._offer.value
            version = self._leaves.version
            dropped, leaves = self._dropped.value, self._leaves.value
            # The first one may be of nothing, and places are others once it is known what is near to what.
            if offer.snapshot.generation and not (offer.snapshot.adapter_ids_due and self.slices.value is None):
                await asyncio.to_thread(self._make, config, offer, dropped, leaves)
                self._heeded.set(version)
            await first(
                self._config.other_than(config),
                self._offer.other_than(offer),
                self._dropped.other_than(dropped),
                self._leaves.other_than(leaves),
            )

    def _make(self, config: Config, offer: Offer, dropped: frozenset[str], leaves: Mapping[str, Neighbour]) -> None:
        """Set the cells, if there is news. A pod that comes or goes is none."""
        if offer.claimable.keys() != {resource.name for resource in config.claimable}:
            return  # the offer is of another configuration, and its own is about to come
        self._stable = stable_facts(offer, self._stable)
        ground = (config, self._stable, offer.claimable, offer.granted, offer.lost, leaves, dropped)
        if len(self._ground) == len(ground) and all(map(operator.is_, ground, self._ground)):
            return
        self._ground = ground
        facts = Facts(self._stable, leaves)
        self.facts.set(facts)
        catalog = devices_of(config, offer, facts)
        if catalog != self.catalog.value:
            self.catalog.set(catalog)
        slices = slices_of(catalog, config.dra.driver, self._node_name, dropped)
        if slices != self.slices.value:
            self.slices.set(slices)
