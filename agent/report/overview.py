"""What people see of the agent: the status document of this moment, and what happened lately.

It joins the parts that know, and notices when one of them has something new. Nobody waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Hashable
from typing import Any

from agent.config import Config
from agent.hardware.host import Host
from agent.inventory import Inventory
from agent.kubelet.podresources import PodResources
from agent.ledger import Ledger
from agent.model.counters import Counters
from agent.offer.left_out import LeftOut, left_out
from agent.offer.offer import Offer
from agent.report import status
from agent.report.facts import Facts, held
from agent.report.report import Report
from agent.report.status import Served
from agent.state import Latest

REST_SECONDS = 0.5
"""Between two comparisons of offers: the loop answers kubelet, too."""


class Overview:
    """The status document and the recent events of one agent."""

    def __init__(self, facts: NodeFacts, *, node: str, version: str) -> None:
        self.conditions = facts.report.conditions
        self.events = facts.report.events
        self._facts = facts
        self._node = node
        self._version = version
        self._changes = itertools.count(1)
        self._change = 0
        """Number of the last change in the books: some are known before they are in the file."""
        self._guard = threading.Lock()
        self._made: Served | None = None
        self._made_of: Hashable = None

    def follow(self, ledger: Ledger) -> None:
        """Hear of each change in the books."""
        ledger.subscribe(self._changed)
        ledger.watch_holds(self._changed)
        ledger.watch_holds(self.events.hold_changed)
        ledger.watch_attachments(self._changed)
        ledger.watch_attachments(self.events.attachment_changed)
        ledger.watch_claims(self._changed)
        ledger.watch_claims(self.events.claim_changed)

    async def run(self) -> None:
        """Note for ever which units become unhealthy, and which healthy."""
        offer = self._facts.offer.value
        self.events.units_changed({}, offer.offered)
        while True:
            await asyncio.sleep(REST_SECONDS)
            seen, offer = offer, await self._facts.offer.other_than(offer)
            self.events.units_changed(seen.offered, offer.offered)

    def served(self) -> Served:
        """Return the status document of now. Any thread may ask; raises LedgerError while the books cannot be read.

        It is made again only when something changed, and all who ask at once share one: a page that looks every two
        seconds costs a comparison while nothing happens.
        """
        with self._guard:
            state = self._state()  # before the document: what changes meanwhile is seen the next time
            if self._made is None or state != self._made_of:
                self._made, self._made_of = status.served(self._build()), state
            return self._made

    def _changed(self, *_: object) -> None:
        self._change = next(self._changes)  # on any thread: no number is ever there twice

    def _state(self) -> Hashable:
        facts, conditions = self._facts, tuple(self.conditions.found.items())
        hardware = facts.snapshot.value.generation, facts.offer.version
        return (*hardware, self._change, conditions, self.events.noted, facts.report.driver.value)

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
        self.report = report

    def read(self) -> Facts:
        """Read all that a scrape and the status document tell. Raises LedgerError while the books cannot be read."""
        ledger, conditions = self._ledger.value, tuple(self.report.conditions.found)
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
            driver=self.report.driver.value,
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
