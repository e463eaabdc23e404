"""Attachments of claims' devices → what the claims' status is told. No I/O: the writer queues what it hears."""

from __future__ import annotations

from collections.abc import Iterator

from agent.cluster.claims import AttachedDevice, ClaimStatusWriter
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState, Claim, ClaimDevice, network_data
from agent.model.device import Snapshot
from agent.offer.offer import Offer
from agent.state import Latest


class ClaimStatus:
    """Follows the books, and has the writer know what is in pods and what is unprepared."""

    def __init__(self, ledger: Ledger, writer: ClaimStatusWriter, driver: str, offer: Latest[Offer]) -> None:
        self._ledger = ledger
        self._writer = writer
        self._driver = driver
        self._offer = offer
        self._has_begun = self._is_over = False

    def end(self) -> None:
        """Follow no more."""
        self._is_over = True

    async def begin(self) -> None:
        """Follow from the first scan on, and report what there is. A second call changes nothing."""
        while not (offer := self._offer.value).snapshot.generation:
            await self._offer.other_than(offer)
        if self._has_begun:
            return
        self._has_begun = True
        self._ledger.watch_attachments(self._attachment)
        self._ledger.watch_claims(self._claim)
        for row in self._ledger.attachments():
            self._attachment(None, row)

    def _attachment(self, before: Attachment | None, row: Attachment | None) -> None:
        if self._is_over or row is None or not row.claim_uid or row.state is not AttachmentState.ATTACHED:
            return
        claim = self._ledger.claim(row.claim_uid)
        if claim is not None:
            self._writer.attached(claim.ref, *attached(self._driver, claim, row, self._offer.value.snapshot))

    def _claim(self, before: Claim | None, after: Claim | None) -> None:
        if before is not None and after is None:
            self._writer.forget(before.ref.uid)


def attached(driver: str, claim: Claim, row: Attachment, snapshot: Snapshot) -> Iterator[AttachedDevice]:
    """Say what an attachment of a claim is, once for each result that it stands for. Pure."""
    for device in claim.devices:
        if not device.admin and device.device == row.parent:
            yield _told(driver, device, row, snapshot)


def _told(driver: str, device: ClaimDevice, row: Attachment, snapshot: Snapshot) -> AttachedDevice:
    network = network_data(row.result or {}, row.ifname)
    return AttachedDevice(
        driver=driver,
        pool=device.pool,
        device=device.device_name,
        ready_since=row.since,
        share_id=device.share_id,
        interface=network.interface,
        mac=network.mac,
        addresses=network.addresses,
        pci_address=device.device,
        rdma_device=row.undo.rdma or _shared_rdma_device(device.device, snapshot),
        network=str((row.request.get("network") or {}).get("name", "")),
    )


def _shared_rdma_device(address: str, snapshot: Snapshot) -> str:
    """Name the RDMA device that a pod uses in the host's namespace; empty if there is none, or none is shared."""
    found = snapshot.by_address.get(address) if not snapshot.rdma_exclusive else None
    return next((rdma.name for rdma in found.rdma_devices), "") if found is not None else ""
