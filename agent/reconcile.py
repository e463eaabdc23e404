"""Ledger × kernel × kubelet: finds what does not fit, and heals it.

Runs before anything is granted, when the hardware changed, and each minute. Every action has a
reason word, is logged and counted. A device that cannot be healed stays withheld until it can.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from agent.errors import AgentError, Unavailable
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from cni.attachment import Attachments

UNCLAIMED_SECONDS = 60.0
"""How old a grant must be before its absence from PodResources means that no pod has it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """What kubelet says that a pod holds."""

    pod: PodRef
    resource_name: str
    unit_id: str


class Reconciler:
    """Heals attachments and grants."""

    def __init__(
        self,
        ledger: Ledger,
        attachments: Attachments,
        *,
        claims: Callable[[], Awaitable[Sequence[Claim]]],
        devices_of_units: Callable[[], Mapping[str, str] | None],
        replay_spool: Callable[[], int],
        count: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Join the parts.

        `claims` asks kubelet's PodResources; `devices_of_units` maps the offered unit IDs to devices,
        and gives None before the first offer.
        """
        self._ledger = ledger
        self._attachments = attachments
        self._claims = claims
        self._devices_of_units = devices_of_units
        self._replay_spool = replay_spool
        self._count = count
        self._clock = clock
        self.settled = False
        """Whether the grants have agreed with kubelet's word once since the start."""

    async def run_once(self) -> None:
        """Compare everything once, and heal what can be healed.

        Leases come last, since a plugin that hangs takes its whole time limit for each of them.
        """
        await asyncio.to_thread(self.heal_attachments)
        try:
            await self.settle_grants()
        except AgentError as error:
            log.error("grants are not compared: %s", error)
        await asyncio.to_thread(self._settle_leases)

    async def run(self, changed: Callable[[], Awaitable[object]], seconds: float = 60.0) -> None:
        """Reconcile for ever: when `changed` returns, and at the latest after `seconds`."""
        while True:
            await self.run_once()
            try:
                async with asyncio.timeout(seconds):
                    await changed()
            except TimeoutError:
                pass

    def heal_attachments(self) -> None:
        """Replay spooled DELs, then look at every row of the ledger. Blocks.

        Raises nothing that a later time could put right, such as a full disk: it is called before
        the agent serves anybody, and an agent that ends there ends again after each restart.
        """
        try:
            for _ in range(self._replay_spool()):
                self._count("spool-replayed")
            for row in self._ledger.attachments():
                self._heal(row.device)
            self._retry_quarantine()
        except AgentError as error:
            log.error("looking for what to heal ended early: %s", error)

    def _heal(self, device: str) -> None:
        try:
            reason = self._attachments.heal(device)
        except (AgentError, OSError) as error:  # OSError: no descriptor left to look with
            log.error("%s cannot be healed yet: %s", device, error)
            self._count("heal-failed")
        else:
            if reason is not None:
                self._count(reason)

    def _settle_leases(self) -> None:
        try:
            for _ in range(self._attachments.settle_leases()):
                self._count("lease-returned")
        except AgentError as error:
            log.error("leases are still owed: %s", error)

    def _retry_quarantine(self) -> None:
        withheld = self._ledger.quarantines()
        # Read in this order: a device that is withheld meanwhile still has its row.
        held = {row.device for row in self._ledger.attachments()}
        for entry in withheld:
            if entry.device not in held:
                # Its row is gone, so its clean-up was verified after all.
                log.info("%s leaves quarantine (%s)", entry.device, entry.reason)
                self._ledger.end_quarantine(entry.device)
                self._count("quarantine-ended")

    async def settle_grants(self) -> None:
        """Bring the grants in line with kubelet's PodResources, the authority on who holds a unit."""
        try:
            claims = await self._claims()
        except Unavailable as error:
            log.info("grants are not compared: %s", error)
            return
        await asyncio.to_thread(self._settle, claims)

    def _settle(self, claims: Sequence[Claim]) -> None:
        granted = {grant.unit_id: grant for grant in self._ledger.grants()}
        offered = self._devices_of_units()
        devices = offered or {}
        claimed = {claim.unit_id for claim in claims}
        for claim in claims:
            grant = granted.get(claim.unit_id)
            if grant is None and claim.unit_id in devices:
                log.warning("%s of %s was not in the ledger; taken over", claim.unit_id, claim.pod)
                self._ledger.grant(claim.resource_name, {claim.unit_id: devices[claim.unit_id]})
                self._ledger.bind([claim.unit_id], claim.pod)
                self._count("grant-adopted")
            elif grant is not None and (grant.pod is None or _differs(grant.pod, claim.pod)):
                self._ledger.bind([claim.unit_id], claim.pod)
        old = self._clock() - UNCLAIMED_SECONDS
        # A kubelet that has restarted while the API server is away knows no pods, though they run.
        attached = {row.device for row in self._ledger.attachments()}
        unclaimed = [
            grant.unit_id
            for grant in granted.values()
            if grant.unit_id not in claimed and grant.granted_at < old and grant.device not in attached
        ]
        if unclaimed:
            self._ledger.release(unclaimed, granted_before=old)
            for _ in unclaimed:
                self._count("grant-released")
        self.settled = self.settled or offered is not None


def _differs(known: PodRef, claimed: PodRef) -> bool:
    """PodResources knows no UID, so only names can be compared."""
    return (known.namespace, known.name) != (claimed.namespace, claimed.name)
