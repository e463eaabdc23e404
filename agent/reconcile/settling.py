"""Brings the grants of the books in line with what kubelet says: carries out what `grants` decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from agent.ledger import Ledger
from agent.reconcile import grants
from agent.reconcile.grants import UNCLAIMED_SECONDS, Claim, Ended

log = logging.getLogger(__name__)


class Count(Protocol):
    def __call__(self, action: str, reason: str) -> None:
        """Count an action and why it was taken."""


class GrantSettling:
    """Writes the books. Methods block."""

    def __init__(self, ledger: Ledger, count: Count, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._count = count
        self._clock = clock

    def settle(
        self,
        claims: Sequence[Claim],
        offered: Mapping[str, str] | None,
        moved: Mapping[str, str],
        asked_at: float,
        ended: Sequence[Ended],
    ) -> None:
        """Go by what kubelet said when it was asked at `asked_at`; for the others see `grants.decide`.

        Not by the clock of now: healing may have taken minutes, in which pods were granted units. Raises LedgerError.
        """
        self._date_anew()
        for action in grants.decide(
            self._ledger.grants(),
            claims,
            offered=offered,
            attached={row.device for row in self._ledger.attachments()},
            moved=moved,
            asked_at=asked_at,
            unclaimed_before=asked_at - UNCLAIMED_SECONDS,
            ended=ended,
        ):
            self._carry_out(action, asked_at)

    def _date_anew(self) -> None:
        """Grant once more what was granted at a time to come: the clock was set back.

        Until that time kubelet's word on it would be taken for older than the grant.
        """
        latest = self._clock() + UNCLAIMED_SECONDS
        for grant in self._ledger.grants():
            if grant.granted_at > latest:
                log.warning("the clock was set back since %s was granted", grant.unit_id)
                self._ledger.grant(grant.resource_name, {grant.unit_id: grant.device})
                if grant.pod is not None:
                    self._ledger.bind([grant.unit_id], grant.pod)

    def _carry_out(self, action: grants.Action, asked_at: float) -> None:
        match action:
            case grants.TakeOver(claim, device):
                log.warning("%s of %s was not in the ledger; taken over", claim.unit_id, claim.pod)
                self._ledger.grant(claim.resource_name, {claim.unit_id: device})
                self._ledger.bind([claim.unit_id], claim.pod)
                self._count("grant-adopt", "claimed")
            case grants.Bind(claim):
                self._ledger.bind([claim.unit_id], claim.pod)
                self._count("grant-bind", "claimed")
            case grants.Release(unit_id):
                log.info("%s is free again: kubelet counts it to no pod", unit_id)
                self._ledger.release([unit_id], granted_before=asked_at)
                self._count("grant-release", "unclaimed")
            case grants.Move(unit_id, device, reason):
                log.warning("unit %s stands for %s now: %s", unit_id, device, reason)
                self._ledger.move_grants({unit_id: device})
                self._count("grant-move", reason)
