"""DRA claims, written: prepared, given to pods, and gone.

A device that a claim has alone is in no other hands, and the other way round: who comes second is refused, in the
transaction that would have made it so.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.errors import ClaimConflict, LedgerError
from agent.ledger import rows
from agent.ledger.attachments import AttachmentBook
from agent.ledger.grants import BindingBook
from agent.model.allocation import AttachmentState, Claim, ClaimDevice, ClaimState, PodRef

Guard = Callable[[Claim], AbstractContextManager[None]]


def _unguarded(claim: Claim) -> AbstractContextManager[None]:
    return nullcontext()


class ClaimBook(BindingBook, AttachmentBook):
    """Which devices kubelet gave to pods by DRA."""

    def __init__(self, path: Path, boot_id: str, clock: Callable[[], float]) -> None:
        super().__init__(path, boot_id, clock)
        self._guard_of_claims: Guard = _unguarded

    def guard_claims(self, guard: Guard) -> None:
        """Write each claim that is prepared inside of what `guard` makes of it.

        It may block briefly, and raise LedgerError: then nothing is written.
        """
        self._guard_of_claims = guard

    def prepare_claim(self, claim: Claim) -> Claim:
        """Write a claim and its devices, *preparing*, in place of what is there of the same UID. Return it as written.

        Raises ClaimConflict for a device that another claim, a unit's grant, a slot's binding, or an attachment of a
        pod that the claim is not for has: nothing is written then.
        """
        made = replace(claim, state=ClaimState.PREPARING, boot_id=self.boot_id, since=self._clock())

        def write() -> list[Claim]:
            for found in made.devices:
                if (holder := self._other_holder(made, found)) is not None:
                    raise ClaimConflict(found.device, holder)
            self._write_claims([made])
            return [made]

        with self._guard_of_claims(made):
            self._write(write, durable=False, then=self._put_claims)
        return made

    def move_claims(self, claims: Iterable[Claim]) -> None:
        """Write what claims say now in place of what they said, in one step: their devices have other addresses.

        They stay of the boot that they were prepared in. Raises ClaimConflict if two claims have one device alone.
        """
        made = tuple(claims)

        def write() -> list[Claim]:
            known = [claim for claim in made if claim.ref.uid in self._claimed.by_uid]
            self._write_claims(known)
            return known

        self._write(write, durable=False, then=self._put_claims)

    def set_claim_state(self, uid: str, state: ClaimState) -> None:
        """Write how far kubelet has come with a claim. Raises LedgerError for one that is not in the books."""
        self._change_claim(uid, state=state, since=self._clock())

    def set_claim_pods(self, uid: str, pods: Iterable[PodRef]) -> None:
        """Write for which pods a claim is reserved now. Raises LedgerError for one that is not in the books."""
        self._change_claim(uid, pods=tuple(pods))

    def set_claim_edits(self, uid: str, edits: Mapping[str, Mapping[str, Any]]) -> None:
        """Write what containers get for some devices of a claim (CDI name → containerEdits).

        Raises LedgerError for a claim that is not in the books.
        """

        def write() -> list[Claim]:
            claim = self._known(uid)
            devices = (replace(d, edits=edits[d.cdi_name]) if d.cdi_name in edits else d for d in claim.devices)
            changed = replace(claim, devices=tuple(devices))
            self._write_claims([changed])
            return [changed]

        self._write(write, durable=False, then=self._put_claims)

    def remove_claim(self, uid: str) -> None:
        """Forget a claim and its devices. One that is not there is gone already."""
        gone = {"claim_uid": uid}

        def write() -> None:
            self._db.execute("DELETE FROM claim_devices WHERE claim_uid = :claim_uid", gone)
            self._db.execute("DELETE FROM claims WHERE claim_uid = :claim_uid", gone)

        def mirrored(_: None) -> None:
            self._put_claims((), [uid])

        self._write(write, durable=False, then=mirrored)

    def _change_claim(self, uid: str, **changes: Any) -> None:
        def write() -> list[Claim]:
            changed = replace(self._known(uid), **changes)
            rows.insert(self._db, "claims", [rows.claim_columns(changed)], replace=True)
            return [changed]

        self._write(write, durable=False, then=self._put_claims)

    def _known(self, uid: str) -> Claim:
        claim = self._claimed.by_uid.get(uid)
        if claim is None:
            raise LedgerError(f"claim {uid} is not in the books")
        return claim

    def _write_claims(self, claims: Iterable[Claim]) -> None:
        """Write claims with their devices, in place of what is there of them. In a transaction."""
        claims = tuple(claims)
        columns = [rows.claim_columns(claim) for claim in claims]
        self._db.executemany("DELETE FROM claim_devices WHERE claim_uid = :claim_uid", columns)
        rows.insert(self._db, "claims", columns, replace=True)
        for claim in claims:
            try:
                rows.insert(self._db, "claim_devices", rows.claim_device_columns(claim))
            except sqlite3.IntegrityError as error:
                devices = ", ".join(found.device for found in claim.devices)
                raise ClaimConflict(devices, "another claim, or another request of this one,") from error

    def _other_holder(self, claim: Claim, wanted: ClaimDevice) -> str | None:
        """Tell in words who has a device so that a claim cannot; None if nobody has."""
        if wanted.admin:
            return None
        if (other := self._other_claim(claim, wanted)) is not None:
            return f"claim {other.ref}"
        if wanted.exclusive:
            for grant in self._grants.of_device(wanted.device):
                whom = f"pod {grant.pod}" if grant.pod is not None else "a pod that kubelet has not named yet"
                return f"{whom} ({grant.unit_id} of {grant.resource_name})"
            for binding in self._bindings.of_device(wanted.device):
                return f"pod {binding.pod} ({binding.unit_id} of {binding.resource_name})"
        for row in self._attachments.of_device(wanted.device):
            if not claim.is_for(row.owner.pod):
                leaving = ", from which it is on its way back" if row.state is AttachmentState.DETACHING else ""
                return f"pod {row.owner.pod} (sandbox {row.owner.container_id}{leaving})"
        return None

    def _other_claim(self, claim: Claim, wanted: ClaimDevice) -> Claim | None:
        """Return the claim that has a device alone, or, where it is wanted alone, has it at all."""
        claimed = self._claimed
        alone = claimed.alone.get(wanted.device)
        holders = (
            *((alone,) if alone is not None else ()),
            *(claimed.shared.get(wanted.device, ()) if wanted.exclusive else ()),
        )
        return next((other for other in holders if other.ref.uid != claim.ref.uid), None)
