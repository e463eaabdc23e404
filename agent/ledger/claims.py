"""DRA claims, written: prepared, given to pods, and gone.

A device that a claim has alone is in no other hands, and the other way round: who comes second is refused, in the
transaction that would have made it so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from agent.errors import ClaimConflict, LedgerError
from agent.ledger import rows
from agent.ledger.attachments import AttachmentBook
from agent.model.allocation import AttachmentState, Claim, ClaimState, PodRef


class ClaimBook(AttachmentBook):
    """Which devices kubelet gave to pods by DRA."""

    def prepare_claim(self, claim: Claim) -> Claim:
        """Write a claim and its devices, *preparing*, in place of what is there of the same UID. Return it as written.

        Raises ClaimConflict for a device that another claim, a unit or a slot has, or a pod that the claim is not for:
        nothing is written then.
        """
        devices = tuple(replace(hold, claim_uid=claim.ref.uid) for hold in claim.devices)
        boot_id, now = self.boot_id, self._clock()
        made = replace(claim, state=ClaimState.PREPARING, boot_id=boot_id, since=now, devices=devices)

        def write() -> list[Claim]:
            self._refuse_held(devices)
            self._refuse_attached(made)
            self._drop_holds_of(claim.ref.uid)
            rows.insert(self._db, "claims", [rows.claim_columns(made)], replace=True)
            rows.insert(self._db, "holds", map(rows.hold_columns, devices))
            self._insert_devices(devices)
            return [made]

        with self._guard_of_holds(devices):
            self._write(write, durable=False, then=self._put_claims)
        return made

    def set_claim_state(self, uid: str, state: ClaimState) -> None:
        """Write how far kubelet has come with a claim. Raises LedgerError for one that is not in the books."""
        self._change_claim(uid, state=state, since=self._clock())

    def set_claim_pods(self, uid: str, pods: Iterable[PodRef]) -> None:
        """Write for which pods a claim is reserved now. Raises LedgerError for one that is not in the books."""
        self._change_claim(uid, pods=tuple(pods))

    def remove_claim(self, uid: str) -> None:
        """Forget a claim and its devices. One that is not there is gone already."""

        def write() -> list[str]:
            self._db.execute("DELETE FROM claims WHERE claim_uid = :claim_uid", {"claim_uid": uid})
            return self._drop_holds_of(uid)

        def follow(keys: list[str]) -> None:
            self._claims.remove([uid])
            self._holds.remove(keys)

        self._write(write, durable=False, then=follow)

    def _change_claim(self, uid: str, **changes: Any) -> None:
        def write() -> list[Claim]:
            claim = self._claims.get(uid)
            if claim is None:
                raise LedgerError(f"claim {uid} is not in the books")
            changed = replace(claim, **changes)
            rows.insert(self._db, "claims", [rows.claim_columns(changed)], replace=True)
            return [changed]

        self._write(write, durable=False, then=self._put_claims)

    def _drop_holds_of(self, uid: str) -> list[str]:
        claim = self._claims.get(uid)
        keys = [hold.key for hold in (claim.devices if claim is not None else ())]
        self._drop_rows(keys)
        return keys

    def _refuse_attached(self, claim: Claim) -> None:
        """Raise ClaimConflict for a device that is in a pod that the claim is not for."""
        for device in (device for hold in claim.devices if not hold.admin for device in hold.devices):
            for row in self._attachments.of_device(device):
                if not claim.is_for(row.owner.pod):
                    leaving = ", from which it is on its way back" if row.state is AttachmentState.DETACHING else ""
                    how = f"attached to {row.owner.pod} (sandbox {row.owner.container_id}{leaving})"
                    raise ClaimConflict(device, how)
