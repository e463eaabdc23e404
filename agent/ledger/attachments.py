"""Attachments: devices in pods, from the promise to put one there until it is verifiably back."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.errors import DeviceBusy, LedgerError
from agent.ledger import mirror, old_journal, rows
from agent.ledger.database import Database
from agent.model.allocation import Attachment, AttachmentState, Owner, Undo


class AttachmentBook(Database):
    """Which device is in which pod, and what undoes that."""

    def __init__(self, path: Path, boot_id: str, clock: Callable[[], float]) -> None:
        super().__init__(path, boot_id, clock)
        self._attachments = mirror.of_attachments()
        self._ids = itertools.count(1)

    def _load(self) -> None:
        super()._load()
        journal = old_journal.path_of(self.path)
        if said := old_journal.read(journal):
            self._write(lambda: old_journal.put(self._db, said))
        journal.unlink(missing_ok=True)
        found = self._read("SELECT * FROM attachments ORDER BY attachment_id")
        self._attachments.put(map(rows.attachment, found))
        (last,) = self._read("SELECT max(seq) FROM sqlite_sequence WHERE name = 'attachments'")[0]
        self._ids = itertools.count((last or 0) + 1)

    def _restore(self, db: sqlite3.Connection) -> None:
        super()._restore(db)
        for row in self._attachments.all():
            rows.insert_attachment(db, row)

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
        durable: bool = True,
    ) -> Attachment:
        """Write the *attaching* row. From its return on the hardware may be touched.

        With `durable`, addresses may be leased for it, too. Raises DeviceBusy if any attachment of the device exists.
        """
        row = self._new(
            *(AttachmentState.ATTACHING, owner, ifname, device, resource_name, undo, netns_path, request),
            *(None, self.boot_id),
        )
        self._insert(row, durable)
        return row

    def adopt(
        self,
        owner: Owner,
        *,
        ifname: str,
        device: str,
        resource_name: str,
        undo: Undo,
        netns_path: str,
        request: Mapping[str, Any],
        state: AttachmentState = AttachmentState.ATTACHED,
        result: Mapping[str, Any] | None = None,
        boot_id: str | None = None,
    ) -> Attachment:
        """Write the row of a device that came into its pod by other hands, or before the books were lost.

        *attached* where its pod lives, *detaching* where only the undoing is left. In one step: a row that
        a crash left *attaching* would be undone under the pod. With another `boot_id` than the present one
        the hardware is left alone. Raises DeviceBusy as `begin_attach` does.
        """
        boot = self.boot_id if boot_id is None else boot_id
        row = self._new(state, owner, ifname, device, resource_name, undo, netns_path, request, result, boot)
        self._insert(row, durable=True)
        return row

    def _new(
        self,
        state: AttachmentState,
        owner: Owner,
        ifname: str,
        device: str,
        resource_name: str,
        undo: Undo,
        netns_path: str,
        request: Mapping[str, Any],
        result: Mapping[str, Any] | None,
        boot_id: str,
    ) -> Attachment:
        return Attachment(
            attachment_id=next(self._ids),
            owner=owner,
            ifname=ifname,
            device=device,
            resource_name=resource_name,
            state=state,
            undo=undo,
            boot_id=boot_id,
            netns_path=netns_path,
            request=dict(request),
            result=dict(result) if result is not None else None,
            since=self._clock(),
        )

    def _insert(self, row: Attachment, durable: bool) -> None:
        def write() -> None:
            try:
                rows.insert_attachment(self._db, row)
            except sqlite3.IntegrityError as error:
                raise DeviceBusy(f"{row.device} has an attachment in the ledger already") from error

        self._write(write, durable, lambda _: self._attachments.put([row]))

    def finish_attach(self, attachment_ids: Iterable[int], result: Mapping[str, Any]) -> None:
        """Turn *attaching* rows into *attached*, all or none, with the CNI result that will be answered."""
        ids = tuple(attachment_ids)

        def write() -> list[Attachment]:
            attached = [
                replace(row, state=AttachmentState.ATTACHED, result=dict(result), since=self._clock())
                for row in map(self._attaching, ids)
            ]
            self._db.executemany(
                "UPDATE attachments SET state = 'attached', result = ?, since = ? WHERE attachment_id = ?",
                [(json.dumps(row.result), row.since, row.attachment_id) for row in attached],
            )
            return attached

        self._write(write, durable=False, then=self._attachments.put)

    def _attaching(self, row_id: int) -> Attachment:
        row = self._attachments.get(row_id)
        if row is None or row.state is not AttachmentState.ATTACHING:
            raise LedgerError(f"attachment {row_id} is not in state attaching")
        return row

    def name_owner(self, row: Attachment, owner: Owner, request: Mapping[str, Any]) -> None:
        """Write down whose an adopted row is, and what its network asked for, once that is known."""

        def write() -> None:
            self._db.execute(
                "UPDATE attachments SET container_id = ?, cni_ifname = ?, pod_namespace = ?, pod_name = ?, pod_uid = ?,"
                " request = ? WHERE attachment_id = ?",
                (
                    *(owner.container_id, owner.cni_ifname, owner.pod.namespace, owner.pod.name, owner.pod.uid),
                    *(json.dumps(dict(request)), row.attachment_id),
                ),
            )

        self._write(
            write,
            then=lambda _: self._attachments.put(
                replace(known, owner=replace(owner, netns=known.owner.netns), request=dict(request))
                for known in self._rows([row.attachment_id])
            ),
        )

    def begin_detach(self, attachment_ids: Iterable[int]) -> None:
        """Mark rows *detaching*: a promise to undo them that survives a crash."""
        ids = tuple(attachment_ids)

        def write() -> float:
            now = self._clock()
            self._db.executemany(
                "UPDATE attachments SET state = 'detaching', since = ? WHERE attachment_id = ?",
                [(now, attachment_id) for attachment_id in ids],
            )
            return now

        self._write(
            write,
            durable=False,
            then=lambda now: self._attachments.put(
                replace(row, state=AttachmentState.DETACHING, since=now) for row in self._rows(ids)
            ),
        )

    def finish_detach(self, row: Attachment, *, lease_owed: bool = False) -> None:
        """Drop the row of a device that is back, and end its quarantine.

        With `lease_owed`, keep in the same step that its addresses are still to be given back.
        """

        def write() -> None:
            self._db.execute("DELETE FROM attachments WHERE attachment_id = ?", (row.attachment_id,))
            self._db.execute("DELETE FROM quarantine WHERE device = ?", (row.device,))
            if lease_owed:
                of = row.owner.container_id, row.ifname
                rows.owe_lease(self._db, *of, row.netns_path, row.request, self._clock())

        self._write(write, durable=False, then=lambda _: self._attachments.remove([row.attachment_id]))

    def attachments(self) -> tuple[Attachment, ...]:
        """List all attachments, oldest first."""
        self._check_open()
        return self._attachments.all()

    def attachments_of(self, container_id: str, cni_ifname: str) -> tuple[Attachment, ...]:
        """List what one CNI call's sandbox and interface owns."""
        return tuple(
            row
            for row in self.attachments()
            if row.owner.container_id == container_id and row.owner.cni_ifname == cni_ifname
        )

    def has_interface(self, container_id: str, ifname: str) -> bool:
        """Tell whether a container has, or is being given, an interface of this name."""
        return any(row.owner.container_id == container_id and row.ifname == ifname for row in self.attachments())

    def attachment_on(self, device: str) -> Attachment | None:
        """Return the attachment of a device, whoever owns it."""
        self._check_open()
        found = self._attachments.of_device(device)
        return found[0] if found else None

    def _rows(self, attachment_ids: Iterable[int]) -> tuple[Attachment, ...]:
        found = map(self._attachments.get, attachment_ids)
        return tuple(row for row in found if row is not None)
