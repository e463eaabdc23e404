"""What people see of the agent: the status document of this moment, and what happened lately.

It joins the parts that know, and notices when one of them has something new. Nobody waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from agent.config import Config
from agent.hardware.host import Host
from agent.inventory import Inventory
from agent.kubelet.podresources import PodResources
from agent.ledger import Ledger
from agent.model.counters import Counters
from agent.offer.left_out import LeftOut, left_out
from agent.offer.offer import Offer, Units
from agent.process.conditions import Conditions
from agent.report import status
from agent.report.events import Events
from agent.report.facts import Facts, held
from agent.report.report import Report
from agent.report.status import CachedStatus, Served
from agent.state import Latest

T = TypeVar("T")
LOOK_SECONDS = 0.5
"""How often a new offer is looked for; comparing with the last one costs nothing while it is the same."""


class Overview:
    """The status document and the recent events of one agent."""

    def __init__(
        self,
        facts: NodeFacts,
        conditions: Conditions,
        events: Events,
        *,
        node: str,
        version: str,
    ) -> None:
        self.conditions = conditions
        self.events = events
        self._facts = facts
        self._node = node
        self._version = version
        self._offered: Units = {}
        self._offers = 0
        self._changes = itertools.count(1)
        self._change = 0
        """Number of the last change in the books: some are known before they are in the file."""
        self._cached = CachedStatus(self._state, self._build)

    def follow(self, ledger: Ledger) -> None:
        """Hear of each change in the books."""
        ledger.subscribe(self._changed)
        ledger.watch_holds(self._noting(self.events.hold_changed))
        ledger.watch_attachments(self._noting(self.events.attachment_changed))
        ledger.watch_claims(self._noting(self.events.claim_changed))

    async def run(self) -> None:
        """Note for ever which units become unhealthy, and which healthy."""
        seen = self._facts.offer.value.offered
        self.events.units_changed({}, seen)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            units = self._facts.offer.value.offered
            if units is not seen:
                self.events.units_changed(seen, units)
                seen = units

    def served(self) -> Served:
        """Return the status document. Any thread may ask; raises LedgerError while the books cannot be read."""
        return self._cached.get()

    def _changed(self) -> None:
        self._change = next(self._changes)  # on any thread: no number is ever there twice

    def _noting(self, note: Callable[[T | None, T | None], None]) -> Callable[[T | None, T | None], None]:
        def changed(before: T | None, after: T | None) -> None:
            self._changed()
            note(before, after)

        return changed

    def _state(self) -> Hashable:
        units = self._facts.offer.value.offered
        if units is not self._offered:
            self._offered, self._offers = units, self._offers + 1
        generation, conditions = self._facts.snapshot.value.generation, tuple(self.conditions.found.items())
        driver = self._facts.driver.value
        return (generation, self._offers, self._change, conditions, self.events.noted, driver)

    def _build(self) -> dict[str, Any]:
        return status.build(
            self._facts.read(),
            node=self._node,
            version=self._version,
            kinds=self._facts.kinds(),
            left_out=self._facts.left_out(),
            conditions=self.conditions.found,
            events=self.events.listed(),
        )


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

    def read(self) -> Facts:
        """Read all that a scrape and the status document tell. Raises LedgerError while the books cannot be read."""
        ledger, conditions = self._ledger.value, tuple(self._conditions.found)
        if ledger is None:
            return Facts(self.snapshot.value, conditions=conditions)
        offer = self.offer.value
        return Facts(
            self.snapshot.value,
            offer.offered,
            ledger.holds(),
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
        """Say why devices are not offered. It takes 30 ms on a large node."""
        return left_out(self.config.value.resources, self.offer.value)

    def counters(self, host: Host) -> Counters:
        """Read what adapters count, with the VFs that pods have. The ledger's file need not be readable."""
        ledger = self._ledger.value
        every = held(ledger.holds(), ledger.claims(), ledger.attachments()) if ledger is not None else ()
        return host.counters(self.snapshot.value, frozenset(each.device for each in every))
