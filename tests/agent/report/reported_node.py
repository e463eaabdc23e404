"""A node that is reported: hardware, offer and books as a test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from prometheus_client import CollectorRegistry

from agent.config import Config, HealthSettings, Resource
from agent.hardware.host import Host
from agent.health_history import HealthHistory
from agent.inventory import Inventory
from agent.kubelet.podresources import PodResources
from agent.ledger import Ledger
from agent.model.device import Snapshot
from agent.offer.offer import Offer, Unit
from agent.process.conditions import Conditions
from agent.report.events import Events
from agent.report.metrics import Metrics
from agent.report.overview import NodeFacts, Overview
from agent.report.report import Report
from agent.state import Latest


class ReportedNode:
    """What is reported of a node, and how a test changes it."""

    def __init__(
        self, snapshot: Snapshot, units: Mapping[str, Sequence[Unit]], kinds: Mapping[str, str], books: Ledger | None
    ) -> None:
        """`kinds` are those of the configured resources; no books: they are not open yet."""
        inventory = Inventory(cast(Host, None))
        inventory.scan_seconds = 0.001
        config = Config(resources=tuple(Resource(name, kind) for name, kind in kinds.items()))
        events = Events()
        conditions = Conditions(events.condition)
        self.report = Report(Metrics(CollectorRegistry()), conditions, events, HealthHistory(HealthSettings()))
        self._snapshot = inventory.snapshot
        self._offer = Latest(Offer())
        self.books = Latest(books)
        self.kubelet = PodResources(Path("/nowhere"))
        self.facts = NodeFacts(Latest(config), inventory, self._offer, self.books, self.kubelet, self.report)
        self.overview = Overview(self.facts, node="node-1", version="1.2.3")
        if books is not None:
            self.overview.follow(books)
        self.snapshot = snapshot
        self.units = units

    @property
    def snapshot(self) -> Snapshot:
        """The newest one."""
        return self._snapshot.value

    @snapshot.setter
    def snapshot(self, snapshot: Snapshot) -> None:
        self._snapshot.set(snapshot)

    @property
    def units(self) -> Mapping[str, Sequence[Unit]]:
        """What is offered."""
        return self._offer.value.units

    @units.setter
    def units(self, units: Mapping[str, Sequence[Unit]]) -> None:
        self._offer.set(Offer(self.snapshot, {name: tuple(mine) for name, mine in units.items()}))
