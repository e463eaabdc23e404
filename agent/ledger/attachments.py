"""Attachments: devices in pods, from the promise to put one there until it is verifiably back."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from agent.errors import DeviceBusy, LedgerError
from agent.ledger import rows
from agent.ledger.holds import HoldBook
from agent.model.allocation import Attachment, AttachmentState, Claim, ClaimState, Hold, Owner, PodRef, Undo


class AttachmentBook(HoldBook):
    """Which device is in which pod, and what undoes that."""

    _ids: Iterator[int]

    def watch_attachments(self, watcher: Callable[[Attachment | None, Attachment | None], None]) -> None:
        """Call `watcher` with each attachment before and after a change. It must not block or raise."""
        self._attachments.watch(watcher)

    def begin_attach(
        self,
        owner: Owner,
        *,
        ifname: str,
        device: str,
        resource_name: str,
        undo: Undo,
        netns_path: str,
        request: Mapping[str, Any],
        claim_uid: str = "",
        unit_id: str = "",
        durable: bool = True,
    ) -> Attachment:
        """Write the *attaching* row, and the pod of the unit or slot. From its return on the hardware may be touched.

        `claim_uid` names the DRA claim that brings the device. With `durable`, addresses may be leased for it, too.
        Raises DeviceBusy if any attachment of the device exists, if a claim that is not the pod's has it alone, and
        for a claim that is not prepared.
        """
        row = Attachment(
            attachment_id=next(self._ids),
            owner=owner,
            ifname=ifname,
            device=device,
            resource_name=resource_name,
            state=AttachmentState.ATTACHING,
            undo=undo,
            boot_id=self.boot_id,
            netns_path=netns_path,
            request=dict(request),
            result=None,
            since=self._clock(),
            claim_uid=claim_uid,
        )

        columns = rows.attachment_columns(row)  # before others wait for the file

        def write() -> list[Hold]:
            if claim_uid:
                self._refuse_unprepared(claim_uid)
            self._refuse_others_claim(device, owner.pod)
            self._insert(columns)
            hold = self._holds.get(unit_id)
            # A slot that another sandbox has by now stays that one's: this ADD took long.
            is_its = hold is not None and hold.container_id in ("", owner.container_id)
            named = [replace(hold, pod=owner.pod)] if hold is not None and is_its and hold.pod != owner.pod else []
            rows.update(self._db, "holds", "key", map(rows.pod_of_hold, named))
            return named

        def follow(named: list[Hold]) -> None:
            self._holds.put(named)
            self._attachments.put([row])

        self._write(write, durable, follow)
        return row

    def adopt(self, row: Attachment) -> Attachment:
        """Write the row of a device that came into its pod by other hands, or before the books were lost.

        *attached* where its pod lives, *detaching* where only the undoing is left. In one step: a row that
        a crash left *attaching* would be undone under the pod. With another `boot_id` than the present one
        the hardware is left alone. Number and time are the books'. Raises DeviceBusy if any attachment of the device
        exists.
        """
        made = replace(row, attachment_id=next(self._ids), since=self._clock())
        self._write(lambda: self._insert(rows.attachment_columns(made)), then=lambda _: self._attachments.put([made]))
        return made

    def finish_attach(self, attachment_ids: Iterable[int], result: Mapping[str, Any]) -> None:
        """Turn *attaching* rows into *attached*, all or none, with the CNI result that will be answered."""
        ids = tuple(attachment_ids)

        def attached() -> list[Attachment]:
            now = self._clock()
            return [
                replace(row, state=AttachmentState.ATTACHED, result=dict(result), since=now)
                for row in map(self._attaching, ids)
            ]

        self._update_attachments(attached, "state", "result", "since")

    def note(self, facts: Mapping[int, Mapping[str, Any]]) -> None:
        """Write down what was found out of devices in their pods: attachment ID → what joins its request."""
        self._update_attachments(
            lambda: [replace(r, request={**r.request, **facts[r.attachment_id]}) for r in self._rows(facts)], "request"
        )

    def begin_detach(self, attachment_ids: Iterable[int]) -> None:
        """Mark rows *detaching*: a promise to undo them that survives a crash."""
        ids = tuple(attachment_ids)

        def leaving() -> list[Attachment]:
            now = self._clock()
            return [replace(row, state=AttachmentState.DETACHING, since=now) for row in self._rows(ids)]

        self._update_attachments(leaving, "state", "since")

    def finish_detach(self, row: Attachment, *, lease_owed: bool = False) -> None:
        """Drop the row of a device that is back, and end its quarantine.

        With `lease_owed`, keep in the same step that its addresses are still to be given back.
        """

        def write() -> list[int]:
            gone = {"attachment_id": row.attachment_id, "device": row.device}
            self._db.execute("DELETE FROM attachments WHERE attachment_id = :attachment_id", gone)
            self._db.execute("DELETE FROM quarantine WHERE device = :device", gone)
            if lease_owed:
                of = row.owner.container_id, row.ifname
                rows.owe_lease(self._db, *of, row.netns_path, row.request, self._clock())
            return [row.attachment_id]

        self._write(write, durable=False, then=self._attachments.remove)

    def attachments(self) -> tuple[Attachment, ...]:
        """List all attachments, oldest first."""
        return self._attachments.all()

    def attachments_of(self, container_id: str, cni_ifname: str) -> tuple[Attachment, ...]:
        """List what one CNI call's sandbox and interface owns."""
        return tuple(
            row
            for row in self.attachments()
            if row.owner.container_id == container_id and row.owner.cni_ifname == cni_ifname
        )

    def attachments_of_claim(self, claim: Claim) -> tuple[Attachment, ...]:
        """List what is in pods of a claim, or of the devices that it has alone."""
        return tuple(row for row in self.attachments() if row.claim_uid == claim.ref.uid or row.device in claim.alone)

    def has_interface(self, container_id: str, ifname: str) -> bool:
        """Tell whether a container has, or is being given, an interface of this name."""
        return any(row.owner.container_id == container_id and row.ifname == ifname for row in self.attachments())

    def attachment_on(self, device: str) -> Attachment | None:
        """Return the attachment of a device, whoever owns it."""
        found = self._attachments.of_device(device)
        return found[0] if found else None

    def _refuse_unprepared(self, claim_uid: str) -> None:
        claim = self._claims.get(claim_uid)
        if claim is None or claim.state is not ClaimState.PREPARED:
            what = f"claim {claim.ref} is {claim.state}" if claim is not None else f"claim {claim_uid} is gone"
            raise DeviceBusy(f"{what}, so nothing of it comes into a pod now")

    def _refuse_others_claim(self, device: str, pod: PodRef) -> None:
        for hold in self._holds.of_device(device):
            claim = self._claims.get(hold.claim_uid) if hold.exclusive and not hold.admin else None
            if claim is not None and not claim.is_for(pod):
                raise DeviceBusy(f"{device} is prepared for claim {claim.ref}, which is not of pod {pod}")

    def _insert(self, columns: Mapping[str, Any]) -> None:
        try:
            rows.insert(self._db, "attachments", [columns])
        except sqlite3.IntegrityError as error:
            raise DeviceBusy(f"{columns['device']} has an attachment in the ledger already") from error

    def _update_attachments(self, changed: Callable[[], list[Attachment]], *names: str) -> None:
        """Write what `changed` makes of rows that are there, looked up in the transaction: the fields of these names.

        A pod waits for it, and what such a row holds takes time to be spelt.
        """

        def write() -> list[Attachment]:
            found = changed()
            columns = (rows.cells(row, "attachment_id", *names) for row in found)
            rows.update(self._db, "attachments", "attachment_id", columns)
            return found

        self._write(write, durable=False, then=self._attachments.put)

    def _attaching(self, row_id: int) -> Attachment:
        row = self._attachments.get(row_id)
        if row is None or row.state is not AttachmentState.ATTACHING:
            raise LedgerError(f"attachment {row_id} is not in state attaching")
        return row

    def _rows(self, attachment_ids: Iterable[int]) -> tuple[Attachment, ...]:
        found = map(self._attachments.get, attachment_ids)
        return tuple(row for row in found if row is not None)

    def _load(self) -> None:
        super()._load()
        found = self._read("SELECT * FROM attachments ORDER BY attachment_id")
        self._attachments.put(map(rows.attachment, found))
        (last,) = self._read("SELECT max(seq) FROM sqlite_sequence WHERE name = 'attachments'")[0]
        self._ids = itertools.count((last or 0) + 1)
