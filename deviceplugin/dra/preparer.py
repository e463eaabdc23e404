"""kubelet's two calls for a claim, carried out: books and CDI specs, never hardware.

Prepare: read the claim, plan it, write the rows, write the spec, note that it is prepared, answer. A claim that is
prepared gets the same answer again, and its spec: kubelet forgets the one, a reboot the other. What passes by itself is
waited for here, since kubelet asks again only after more than a minute.

Unprepare: when no device of the claim is in a pod any more, remove the spec, then the rows. Until then it fails, and
kubelet asks again. Both can be killed anywhere: the state in the books says how to go on.

A device in other hands is waited for if that passes by itself: it is on its way back, or its user has ended and only
what follows is missing. A pod that lives keeps its device: the claim that came second fails, and says why.

On disk a claim has its CDI spec and, if wanted, files that describe its devices to its containers (KEP-5304): one for
each request, with a DeviceMetadata object in it. It has what the ResourceSlice says of each device; for a device that
was chosen late, what a slice would say of this one, had it been offered by itself.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.config import Config
from agent.edits.claim_metadata import API_VERSION, requests_with_files
from agent.edits.specs import Specs, file_of_claim
from agent.errors import AgentError, ClaimConflict, DeviceBusy, LedgerError, NotYet, Refused, Unavailable
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import AsksKubelet
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState, Claim, ClaimRef, ClaimState, Hold, PodRef
from agent.state import Latest
from deviceplugin.dra.allocated_claim import Allocation
from deviceplugin.dra.attributes import Attributes, Facts, attributes_of
from deviceplugin.dra.devices import DraDevice
from deviceplugin.dra.planner import Planner, PodFacts
from deviceplugin.dra.pods import Allocations

if TYPE_CHECKING:
    from cni.attachment import Attachments
    from cni.pod_devices import ClaimReader

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, in seconds."""

    prepare: float = 35.0
    """For devices that are about to be free. kubelet waits 45 s in all."""
    unprepare: float = 20.0
    """For devices on their way back."""
    poll: float = 0.05
    back: float = 0.005
    """Between two looks whether a device is back: the next pod's Prepare may be waiting, and its row is in memory."""
    slow_poll: float = 5.0
    """Between two looks that ask others."""
    longer: float = 0.1
    """Looks grow rarer with the time waited, by this part of it: the claims of a whole node may wait at once."""


PATIENCE = Patience()


class Preparer:
    """Prepares claims. Methods block; no two calls at once for one claim."""

    def __init__(
        self,
        allocations: Allocations,
        planner: Planner,
        ledger: Ledger,
        files: ClaimFiles,
        users: DeviceUsers,
        patience: Patience = PATIENCE,
    ) -> None:
        self._allocations = allocations
        self._planner = planner
        self._ledger = ledger
        self._files = files
        self._users = users
        self._patience = patience

    # ---------------------------------------------------------------------------------------------------- prepare

    def prepare(self, ref: ClaimRef) -> Sequence[Hold]:
        """Make a claim's devices ready for its containers. Raises AgentError."""
        deadline = time.monotonic() + self._patience.prepare
        known = self._ledger.claim(ref.uid)
        claim = self._read(ref, known)
        if known is not None and (claim is None or self._still_holds(known, claim)):
            # Of a group's pods ADD may have found some that are not known here.
            if claim is not None and known.pods != claim.pods and not claim.groups:
                self._ledger.set_claim_pods(ref.uid, claim.pods)
            return self._complete(known, claim)
        assert claim is not None
        return self._complete(self._written(self._allocations.with_members(claim), deadline), claim)

    def _read(self, ref: ClaimRef, known: Claim | None) -> Allocation | None:
        """Read what a claim got. None if the API server is away and the books know that.

        Of an earlier boot they know too little: its character devices may be another's now.
        """
        try:
            return self._allocations.of(ref)
        except Refused:
            raise
        except Unavailable as error:
            if known is None or known.boot_id != self._ledger.boot_id or known.state is ClaimState.UNPREPARING:
                raise Unavailable(f"claim {ref} cannot be read, so what it got is not known: {error}") from error
            log.warning("claim %s is prepared as the books have it: %s", ref, error)
            return None

    def _still_holds(self, known: Claim, claim: Allocation) -> bool:
        """Tell whether the rows are those of this allocation, with nothing in them that a reboot makes untrue."""
        rows = {(found.request, found.device_name, found.share_id) for found in known.devices}
        results = {(result.base, result.device, result.share_id) for result in claim.results}
        return known.state is not ClaimState.UNPREPARING and known.boot_id == self._ledger.boot_id and rows == results

    def _written(self, claim: Allocation, deadline: float) -> Claim:
        """Plan a claim and write its rows, once others have let go of its devices."""
        known: PodFacts | None = None
        began, asked_at = time.monotonic(), 0.0
        while True:
            try:
                known = known or self._planner.ask(claim)
                with self._planner.choosing:
                    return self._ledger.prepare_claim(self._planner.plan(claim, known))
            except (ClaimConflict, NotYet) as error:
                now = time.monotonic()
                if now >= asked_at + self._patience.slow_poll:
                    if not self._passes(claim, error):
                        raise
                    asked_at = now
                if now > deadline:
                    waited = f"still so after {self._patience.prepare:g} s"
                    raise DeviceBusy(f"{error}; {waited}") from error
            time.sleep(max(self._patience.poll, self._patience.longer * (now - began)))

    def _passes(self, claim: Allocation, error: ClaimConflict | NotYet) -> bool:
        devices = [error.device] if isinstance(error, ClaimConflict) else error.devices
        return devices is None or self._users.passes(claim.ref.uid, devices)

    def _complete(self, claim: Claim, allocation: Allocation | None) -> Sequence[Hold]:
        """Do what follows the rows, or do it once more. Raises NotYet if they were ended meanwhile, as nobody's."""
        self._files.complete(claim, allocation)
        now = self._ledger.claim(claim.ref.uid)
        if now is None or now.state is ClaimState.UNPREPARING:
            raise NotYet(f"claim {claim.ref} was just ended, since nobody had it: kubelet prepares it again")
        if claim.state is not ClaimState.PREPARED:
            self._ledger.set_claim_state(claim.ref.uid, ClaimState.PREPARED)
        return claim.devices

    # -------------------------------------------------------------------------------------------------- unprepare

    def unprepare(self, ref: ClaimRef) -> None:
        """Take a claim's devices back into stock. Raises DeviceBusy while one of them is in a pod."""
        claim = self._ledger.claim(ref.uid)
        if claim is not None:
            if claim.state is not ClaimState.UNPREPARING:
                self._ledger.set_claim_state(ref.uid, ClaimState.UNPREPARING)
            self._await_home(claim)
        self._files.remove(ref.uid)
        self._ledger.remove_claim(ref.uid)

    def _await_home(self, claim: Claim) -> None:
        began, rows = time.monotonic(), self._ledger.attachments_of_claim(claim)
        # What no ADD brought in, of a pod on the host's network or by vfio, only the sandbox shows. kubelet may forget
        # a pod that was deleted by force before it has stopped that.
        if claim.alone - {row.device for row in rows} and (sandbox := self._users.living(claim)) is not None:
            raise DeviceBusy(
                f"sandbox {sandbox.sandbox_id} of pod {sandbox.pod}, which has the claim, lives: its devices come back"
                " when the runtime has stopped that"
            )
        for row in rows:
            left = row if row.state is AttachmentState.DETACHING else self._users.heal(row)
            while left is not None and not self._is_quarantined(left.device):
                if left.state is not AttachmentState.DETACHING:
                    owner = left.owner
                    raise DeviceBusy(
                        f"{left.device} is in sandbox {owner.container_id} of pod {owner.pod}, which lives: it comes"
                        " back when the runtime has stopped that"
                    )
                waited = time.monotonic() - began
                if waited > self._patience.unprepare:
                    raise DeviceBusy(
                        f"{left.device} is on its way back from pod {left.owner.pod} for more than"
                        f" {self._patience.unprepare:g} s"
                    )
                time.sleep(max(self._patience.back, self._patience.longer * waited))
                left = self._users.row(left)

    def _is_quarantined(self, device: str) -> bool:
        """Tell whether a device is in quarantine: then it is nobody's until it is clean, and nobody need wait."""
        return any(withheld.device == device for withheld in self._ledger.quarantines())


class DeviceUsers:
    """Knows who has what. Methods block, and may be used by many threads at once."""

    def __init__(self, ledger: Ledger, reader: ClaimReader, kubelet: AsksKubelet, attachments: Attachments) -> None:
        self._ledger = ledger
        self._reader = reader
        self._kubelet = kubelet
        self._attachments = attachments

    def passes(self, claim_uid: str, devices: Iterable[str]) -> bool:
        """Tell whether one of the devices that a claim wants is about to be free, as far as that can be known.

        Where one is on its way back by the books, nobody is asked about all the others; and when the API server does
        not answer of one claim it is not asked for more: each question may take its time.
        """
        try:
            return any(all(self._users_of(claim_uid, each)) for each in sorted(devices, key=self._is_staying))
        except Unavailable as error:
            log.warning("whether what claim %s wants is about to be free is not known: %s", claim_uid, error)
            return False

    def _is_staying(self, device: str) -> bool:
        claim, row = self._ledger.claim_on(device), self._ledger.attachment_on(device)
        is_leaving = row is not None and row.state is AttachmentState.DETACHING
        return not is_leaving and (claim is None or claim.state is not ClaimState.UNPREPARING)

    def _users_of(self, claim_uid: str, device: str) -> Iterator[bool]:
        """Tell of each holder whether it is about to let go. What costs more comes later."""
        holds = [hold for hold in self._ledger.holds_on(device) if hold.claim_uid != claim_uid]
        for uid in dict.fromkeys(hold.claim_uid for hold in holds if hold.claim_uid):
            claim = self._ledger.claim(uid)
            yield claim is None or self._is_over(claim)
        yield from self._rows(device)
        for hold in holds:
            if not hold.claim_uid:  # kubelet takes a unit back without a word, and a look finds that out
                yield hold.pod is not None and self._is_gone(hold.pod)

    def heal(self, row: Attachment) -> Attachment | None:
        """Bring a device back whose namespace has gone, and return its row if it is still there.

        A device whose return fails is in quarantine then, and the row stays.
        """
        try:
            self._attachments.heal(row.device)
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
        now = self._ledger.attachment_on(row.device)
        return now if now is not None and now.attachment_id == row.attachment_id else None

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

    def _is_gone(self, pod: PodRef) -> bool:
        try:
            return self._kubelet.pod(pod) is None
        except Unavailable:
            return False


def documents_of(
    claim: Allocation, attributes: Mapping[tuple[str, str, str], Attributes]
) -> Mapping[str, Mapping[str, Any]]:
    """Map each request to its DeviceMetadata. `attributes` are those of each result, by request, device and share."""
    found: dict[str, dict[str, Any]] = {}
    for result in claim.results:
        ref = claim.ref
        document = found.setdefault(
            result.base,
            {
                "kind": "DeviceMetadata",
                "apiVersion": API_VERSION,
                "metadata": {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid},
                **({"podClaimName": claim.pod_claim} if claim.pod_claim else {}),
                "requests": [{"name": result.request, "devices": []}],
            },
        )
        device = {"driver": result.driver, "pool": result.pool, "name": result.device}
        told = attributes[result.base, result.device, result.share_id]
        document["requests"][0]["devices"].append(device | ({"attributes": told} if told else {}))
    return found


class ClaimFiles:
    """Writes and removes what of claims is on disk. Methods block, briefly."""

    def __init__(
        self,
        specs: Specs,
        config: Latest[Config],
        catalog: Latest[tuple[DraDevice, ...]],
        facts: Latest[Facts],
    ) -> None:
        """`facts` are what the catalog's attributes are made of."""
        self._specs = specs
        self._config = config
        self._catalog = catalog
        self._facts = facts

    def complete(self, claim: Claim, allocation: Allocation | None) -> None:
        """Write what is missing of a claim's files; all of them if it is not prepared yet.

        Raises Unavailable, also if the `allocation` is needed and the API server did not tell it.
        """
        is_missing = self._specs.metadata.misses(claim)
        if is_missing and allocation is None:
            raise Unavailable(f"the files that tell of claim {claim.ref} are gone, and the API server is away")
        is_new = claim.state is not ClaimState.PREPARED and bool(requests_with_files(claim))
        if allocation is not None and (is_missing or is_new):
            attributes = {(d.request, d.device_name, d.share_id): self._attributes(d) for d in claim.devices}
            for request, document in documents_of(allocation, attributes).items():
                self._specs.metadata.write(claim.ref.uid, request, document)
        self._specs.sync([file_of_claim(claim.ref.uid)])

    def remove(self, uid: str) -> None:
        """Remove a claim's files. What is not there is removed already. Raises Unavailable."""
        self._specs.remove(file_of_claim(uid))

    def _attributes(self, device: Hold) -> Attributes:
        """Tell what is known of a device; nothing if its resource is offered no more."""
        resource = next((r for r in self._config.value.claimable if r.name == device.resource_name), None)
        if resource is None:
            return {}
        mine = [listed for listed in self._catalog.value if listed.resource_name == resource.name]
        if resource.binding != "late":
            return next((listed.attributes for listed in mine if listed.name == device.device_name), {})
        facts = self._facts.value
        pci = facts.stable.snapshot.by_address.get(device.device)
        unit = next((unit for listed in mine for unit in listed.units if unit.device == device.device), None)
        return attributes_of(resource, unit, pci, facts) if unit is not None and pci is not None else {}
