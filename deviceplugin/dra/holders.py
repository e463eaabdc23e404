"""Who has a device that a claim is to have, and whether that passes by itself.

It does if the device is on its way back, or if whoever has it has ended and only what follows is missing. A pod that
lives keeps its device: the claim that came second fails, and says why.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from agent.errors import AgentError, LedgerError, Unavailable
from agent.kubelet.cri import Sandbox
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState, PodRef
from agent.model.claims import Claim, ClaimRef, ClaimState
from deviceplugin.dra.pod_gpus import Kubelet

log = logging.getLogger(__name__)


class ClaimReader(Protocol):
    """Reads claims from the API server."""

    def get(self, ref: ClaimRef) -> Mapping[str, Any] | None:
        """Return the claim as it is now; None if there is none of its UID. Raises Unavailable."""


class Healer(Protocol):
    """Brings devices back that were left behind."""

    def heal(self, device: str) -> str | None:
        """Have a device back if the namespace that it is in has gone. Tell what was wrong; None if nothing.

        Raises AgentError if it is still not back.
        """


class Holders:
    """Knows who has what. Methods block, and may be used by many threads at once."""

    def __init__(self, ledger: Ledger, reader: ClaimReader, kubelet: Kubelet, healer: Healer) -> None:
        self._ledger = ledger
        self._reader = reader
        self._kubelet = kubelet
        self._healer = healer

    def passes(self, claim_uid: str, devices: Iterable[str]) -> bool:
        """Tell whether one of the devices that a claim wants is about to be free, as far as that can be known.

        Where one is on its way back by the books, nobody is asked about all the others; and when the API server does
        not answer of one claim it is not asked for more: each question may take its time.
        """
        try:
            return any(all(self._holders(claim_uid, each)) for each in sorted(devices, key=self._is_staying))
        except Unavailable as error:
            log.warning("whether what claim %s wants is about to be free is not known: %s", claim_uid, error)
            return False

    def _is_staying(self, device: str) -> bool:
        claim, row = self._ledger.claim_on(device), self._ledger.attachment_on(device)
        is_leaving = row is not None and row.state is AttachmentState.DETACHING
        return not is_leaving and (claim is None or claim.state is not ClaimState.UNPREPARING)

    def _holders(self, claim_uid: str, device: str) -> Iterator[bool]:
        """Tell of each holder whether it is about to let go. What costs more comes later."""
        yield from self._claims(claim_uid, device)
        yield from self._rows(device)
        yield from self._plugins(device)

    def heal(self, row: Attachment) -> Attachment | None:
        """Bring a device back whose namespace has gone, and return its row if it is still there.

        A device whose return fails is in quarantine then, and the row stays.
        """
        try:
            self._healer.heal(row.device)
        except AgentError as error:
            log.warning("%s is not back: %s", row.device, error)
        return self.row(row)

    def living(self, claim: Claim) -> Sandbox | None:
        """Find a sandbox that lives of a pod with a claim, as far as the runtime can be asked."""
        try:
            return next((each for each in self._kubelet.sandboxes() if each.ready and claim.is_for(each.pod)), None)
        except Unavailable as error:
            log.warning("whether a sandbox with claim %s lives is not known: %s", claim.ref, error)
            return None

    def row(self, row: Attachment) -> Attachment | None:
        """Return a row as it is now; None if it is gone."""
        now = (other for other in self._ledger.attachments() if other.attachment_id == row.attachment_id)
        return next(now, None)

    def _claims(self, claim_uid: str, device: str) -> Iterator[bool]:
        for other in self._ledger.claims():
            if other.ref.uid != claim_uid and any(d.device == device and not d.admin for d in other.devices):
                yield self._is_over(other)

    def _is_over(self, claim: Claim) -> bool:
        """Tell whether nobody may use a claim any more: then its pods are gone or ending, and kubelet unprepares it.

        The books say so from then on: should kubelet have lost its notes, the claim is ended without it, though there
        may be another pod of the same name. Raises Unavailable.
        """
        if claim.state is ClaimState.UNPREPARING:
            return True
        found = self._reader.get(claim.ref)
        is_over = found is None or not (found.get("status") or {}).get("reservedFor")
        if is_over:
            with contextlib.suppress(LedgerError):  # it is gone from the books
                self._ledger.set_claim_state(claim.ref.uid, ClaimState.UNPREPARING)
        return is_over

    def _rows(self, device: str) -> Iterator[bool]:
        row = self._ledger.attachment_on(device)
        if row is None:
            return
        if row.state is not AttachmentState.DETACHING:
            row = self.heal(row)
        if row is not None:
            claim = self._ledger.claim(row.claim_uid) if row.claim_uid else None
            yield row.state is AttachmentState.DETACHING or (claim is not None and self._is_over(claim))

    def _plugins(self, device: str) -> Iterator[bool]:
        """Look at what device plugins gave to pods: kubelet takes it back without a word, and a look finds that out."""
        units = set(self._ledger.granted_units(device))
        pods = [grant.pod for grant in self._ledger.grants() if grant.unit_id in units] if units else []
        bound = self._ledger.binding_on(device)
        for pod in (*pods, *([bound.pod] if bound is not None else ())):
            yield pod is not None and self._is_gone(pod)

    def _is_gone(self, pod: PodRef) -> bool:
        try:
            return self._kubelet.pod(pod) is None
        except Unavailable:
            return False
