"""kubelet's two calls for a claim, carried out: books and CDI specs, never hardware.

Prepare: read the claim, plan it, write the rows, write the spec, note that it is prepared, answer. A claim that is
prepared gets the same answer again, and its spec: kubelet forgets the one, a reboot the other. What passes by itself is
waited for here, since kubelet asks again only after more than a minute.

Unprepare: when no device of the claim is in a pod any more, remove the spec, then the rows. Until then it fails, and
kubelet asks again. Both can be killed anywhere: the state in the books says how to go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from agent.edits.claim_specs import qualified
from agent.errors import ClaimConflict, ClaimInvalid, DeviceBusy, NotYet, Refused, Unavailable
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState
from agent.model.claims import Claim, ClaimDevice, ClaimRef, ClaimState
from deviceplugin.dra.allocation import Allocation, ours
from deviceplugin.dra.holders import ClaimReader, Holders
from deviceplugin.dra.metadata import ClaimFiles
from deviceplugin.dra.planner import Known, Planner
from deviceplugin.dra.pod_groups import PodGroups
from deviceplugin.dra.server import PreparedDevice

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


class Allocations:
    """Reads claims, and what of them is ours."""

    def __init__(self, reader: ClaimReader, groups: PodGroups, driver: str, pool: str) -> None:
        self._reader = reader
        self._groups = groups
        self._driver = driver
        self._pool = pool

    def of(self, ref: ClaimRef) -> Allocation:
        """Read a claim. Raises ClaimInvalid, Unavailable, and Refused without the right to read."""
        found = self._reader.get(ref)
        if found is None:
            raise ClaimInvalid(f"claim {ref} does not exist any more, or was made anew")
        return ours(found, ref, self._driver, self._pool)

    def with_members(self, claim: Allocation) -> Allocation:
        """Add the pods of the groups that a claim is reserved for. Reads them from the API server."""
        return self._groups.with_members(claim)


class Preparer:
    """Prepares claims. Methods block; no two calls at once for one claim."""

    def __init__(
        self,
        allocations: Allocations,
        planner: Planner,
        ledger: Ledger,
        files: ClaimFiles,
        holders: Holders,
        patience: Patience = PATIENCE,
    ) -> None:
        self._allocations = allocations
        self._planner = planner
        self._ledger = ledger
        self._files = files
        self._holders = holders
        self._patience = patience

    # ---------------------------------------------------------------------------------------------------- prepare

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
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
        known: Known | None = None
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
        return devices is None or self._holders.passes(claim.ref.uid, devices)

    def _complete(self, claim: Claim, allocation: Allocation | None) -> Sequence[PreparedDevice]:
        """Do what follows the rows, or do it once more. Raises NotYet if they were ended meanwhile, as nobody's."""
        self._files.complete(claim, allocation, partial(self._ledger.claim, claim.ref.uid))
        now = self._ledger.claim(claim.ref.uid)
        if now is None or now.state is ClaimState.UNPREPARING:
            raise NotYet(f"claim {claim.ref} was just ended, since nobody had it: kubelet prepares it anew")
        if claim.state is not ClaimState.PREPARED:
            self._ledger.set_claim_state(claim.ref.uid, ClaimState.PREPARED)
        return [_told(device) for device in claim.devices]

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
        began, rows = time.monotonic(), self._rows_of(claim)
        alone = _alone(claim)
        # What no ADD brought in, of a pod on the host's network or by vfio, only the sandbox shows. kubelet may forget
        # a pod that was deleted by force before it has stopped that.
        if alone - {row.device for row in rows} and (sandbox := self._holders.living(claim)) is not None:
            raise DeviceBusy(
                f"sandbox {sandbox.sandbox_id} of pod {sandbox.pod}, which has the claim, lives: its devices come back"
                " when the runtime has stopped that"
            )
        for row in rows:
            left = row if row.state is AttachmentState.DETACHING else self._holders.heal(row)
            while left is not None and not self._is_withheld(left.device):
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
                left = self._holders.row(left)

    def _rows_of(self, claim: Claim) -> list[Attachment]:
        """List what of a claim is in pods."""
        alone = _alone(claim)
        return [row for row in self._ledger.attachments() if row.claim_uid == claim.ref.uid or row.device in alone]

    def _is_withheld(self, device: str) -> bool:
        """Tell whether a device is in quarantine: then it is nobody's until it is clean, and nobody need wait."""
        return any(withheld.device == device for withheld in self._ledger.quarantines())


def _alone(claim: Claim) -> frozenset[str]:
    return frozenset(found.device for found in claim.devices if found.exclusive and not found.admin)


def _told(device: ClaimDevice) -> PreparedDevice:
    names = (qualified(device.cdi_name),) if device.cdi_name else ()
    return PreparedDevice((device.request,), device.pool, device.device_name, names, device.share_id)
