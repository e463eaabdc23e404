"""The node as people and Prometheus are told of it, read from the parts that know when somebody asks."""

from __future__ import annotations

from agent.config import Config
from agent.hardware.host import Host
from agent.inventory import Inventory
from agent.kubelet.podresources import PodResources
from agent.ledger import Ledger
from agent.model.counters import Counters
from agent.model.device import Snapshot
from agent.offer.left_out import LeftOut, left_out
from agent.offer.offer import Offer
from agent.offer.offers import differs_in_pods_only
from agent.report.metrics import Facts
from agent.report.report import Report
from agent.state import Latest


class NodeFacts:
    """Reads the facts. Any thread may."""

    def __init__(
        self,
        config: Latest[Config],
        inventory: Inventory,
        offer: Latest[Offer],
        ledger: Latest[Ledger | None],
        kubelet: PodResources,
        report: Report,
    ) -> None:
        """`ledger` is None until it is open."""
        self.config = config
        self.snapshot = inventory.snapshot
        self.offer = offer
        self._inventory = inventory
        self._ledger = ledger
        self._kubelet = kubelet
        self.driver = report.driver
        self._conditions = report.conditions
        self._looked: tuple[object, Snapshot, tuple[LeftOut, ...]] | None = None
        """What devices were left out of last: their reasons stay until hardware or lists change."""

    def read(self) -> Facts:
        """Read all that a scrape and the status document tell. Raises LedgerError while the books cannot be read."""
        ledger, conditions = self._ledger.value, tuple(self._conditions.found)
        if ledger is None:
            return Facts(self.snapshot.value, conditions=conditions)
        offer = self.offer.value
        return Facts(
            self.snapshot.value,
            offer.offered,
            ledger.grants(),
            ledger.attachments(),
            ledger.quarantines(),
            self._inventory.scan_seconds * 1000,
            ledger.owed_leases(),
            self._kubelet.newest.value.containers,
            conditions,
            exporter_names=self.config.value.endpoints.exporter_names,
            adapters=offer.adapters,
            claims=ledger.claims(),
            driver=self.driver.value,
            rails=offer.rail_keys,
        )

    def kinds(self) -> dict[str, str]:
        """Name each offered resource's kind. One that the configuration does not have is of slices of GPUs (MIG)."""
        configured = {resource.name: resource.kind for resource in self.config.value.resources}
        return {
            name: configured.get(name) or next((unit.kind for unit in units), "gpu")
            for name, units in self.offer.value.offered.items()
        }

    def left_out(self) -> tuple[LeftOut, ...]:
        """Say why devices are not offered. It takes 30 ms on a large node, and pods that come or go change nothing."""
        resources, offer = self.config.value.resources, self.offer.value
        lists = (resources, tuple((name, offer.pools.get(name, units)) for name, units in offer.offered.items()))
        if self._looked is not None:
            before, snapshot, found = self._looked
            if lists == before and (offer.snapshot is snapshot or differs_in_pods_only(snapshot, offer.snapshot)):
                return found
        found = left_out(resources, offer)
        self._looked = lists, offer.snapshot, found
        return found

    def counters(self, host: Host) -> Counters:
        """Read what adapters count, with the VFs that kubelet has granted or CNI brought into pods by itself."""
        ledger = self._ledger.value
        held: frozenset[str] = frozenset()
        if ledger is not None:
            granted = (device for grant in ledger.grants() for device in grant.devices)
            held = frozenset((*granted, *(row.device for row in ledger.attachments())))
        return host.counters(self.snapshot.value, held)
