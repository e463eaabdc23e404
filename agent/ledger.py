"""The ledger: what this node promised to kubelet and did to hardware.

Owns ledger.db and every SQL statement. Knows nothing of gRPC, CNI or netlink.
A row is written before the hardware is touched, so a crash leaves a row to undo, never a lost
device. Writes are done one at a time, reads through a connection of their own, so that none waits for
a write that waits for the disk. All run on the caller's thread, which may be any but the event
loop's: a pod's start waits for them, and to wake another thread takes longer than to write a row.

Durability: what is written survives the death of the process, always. What a power cut must not
take either is on the disk before the method returns (`synchronous=FULL`): an attachment that gets
addresses, since leases outlive the power cut, and a quarantine. The rest is handed to the kernel
(`NORMAL`). For a reboot undoes every attachment: a row that has lost its last step is cleaned up
as any row of an earlier boot, and one that is there again gives its addresses back once more, which
is harmless. Grants are told again by kubelet's PodResources. This keeps a slow disk out of pod
admission, and out of pods' start.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from agent.errors import DeviceBusy, LedgerError
from agent.model.allocation import (
    Attachment,
    AttachmentState,
    Grant,
    NetnsId,
    OwedLease,
    Owner,
    PodRef,
    Quarantine,
    Undo,
)

SCHEMA_VERSION = 1

log = logging.getLogger(__name__)
T = TypeVar("T")


class Ledger:
    """Open books. Use `Ledger.open`; close it when done."""

    def __init__(self, path: Path, boot_id: str, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self.boot_id = boot_id
        self.recovered_from: Path | None = None
        """Where a damaged file was set aside at opening; None if there was none."""
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._db: sqlite3.Connection
        self._reader: sqlite3.Connection
        self._is_open = True

    @classmethod
    def open(cls, path: Path, boot_id: str, clock: Callable[[], float] = time.time) -> Ledger:
        """Open or create the ledger file.

        A damaged file is set aside (`recovered_from` names it) and an empty one begun: kubelet's
        PodResources and the kernel still know the rest. Raises LedgerError for a file written by a
        newer version, and for a folder or disk that cannot be written.
        """
        ledger = cls(path, boot_id, clock)
        with ledger._translated():
            ledger._connect()
            ledger._reader = ledger._open_reader()
        return ledger

    def close(self) -> None:
        """Finish what is under way and close the file. Whoever comes later gets a LedgerError."""
        with self._writing, self._reading:
            if self._is_open:
                self._is_open = False
                self._reader.close()
                self._db.close()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change, before anybody can make the next. It must not block or raise."""
        self._listeners.append(listener)

    # ------------------------------------------------------------------ grants

    def grant(self, resource_name: str, units: Mapping[str, str]) -> None:
        """Record that kubelet was given these units (unit ID → device).

        A unit that is granted already starts a new life without an owner: an init container's
        unit is granted again to the main container, and kubelet frees units without a word.
        """

        def write() -> None:
            now = self._clock()
            self._db.executemany(
                "INSERT INTO grants (unit_id, resource_name, device, granted_at) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (unit_id) DO UPDATE SET resource_name = excluded.resource_name,"
                " device = excluded.device, granted_at = excluded.granted_at,"
                " pod_namespace = NULL, pod_name = NULL, pod_uid = NULL",
                [(unit, resource_name, device, now) for unit, device in units.items()],
            )

        self._write(write, durable=False)

    def bind(self, unit_ids: Iterable[str], pod: PodRef) -> None:
        """Name the pod that holds these granted units. Binding the same pod twice is a no-op."""
        units = tuple(unit_ids)

        def write() -> None:
            self._db.executemany(
                "UPDATE grants SET pod_namespace = ?, pod_name = ?, pod_uid = ? WHERE unit_id = ?",
                [(pod.namespace, pod.name, pod.uid, unit) for unit in units],
            )

        self._write(write, durable=False)

    def release(self, unit_ids: Iterable[str], granted_before: float = math.inf) -> None:
        """Forget the grants of these units: kubelet no longer counts them to any pod.

        `granted_before` (seconds since the epoch) spares one that was granted anew meanwhile.
        """
        units = [(unit, granted_before) for unit in unit_ids]

        def write() -> None:
            self._db.executemany("DELETE FROM grants WHERE unit_id = ? AND granted_at < ?", units)

        self._write(write, durable=False)

    def grants(self) -> tuple[Grant, ...]:
        """List all grants, oldest first."""
        rows = self._read("SELECT * FROM grants ORDER BY granted_at, unit_id")
        return tuple(_grant(row) for row in rows)

    def granted_resource(self, device: str) -> str | None:
        """Name the resource that a unit of this device was granted for; None if none is."""
        rows = self._read("SELECT resource_name FROM grants WHERE device = ? LIMIT 1", (device,))
        return rows[0]["resource_name"] if rows else None

    def granted_devices(self, resource_names: Iterable[str]) -> dict[str, str]:
        """List the granted units of some resources with their devices."""
        names = tuple(resource_names)
        marks = ", ".join("?" * len(names))
        rows = self._read(f"SELECT unit_id, device FROM grants WHERE resource_name IN ({marks})", names)  # noqa: S608
        return {row["unit_id"]: row["device"] for row in rows}

    # ------------------------------------------------------------- attachments

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

        Without `durable` no address may be leased for it. Raises DeviceBusy if any attachment of the
        device exists.
        """

        def write() -> Attachment:
            now = self._clock()
            try:
                cursor = self._db.execute(
                    "INSERT INTO attachments (container_id, cni_ifname, pod_namespace, pod_name, pod_uid,"
                    " netns_device, netns_inode, netns_path, ifname, device, resource_name, state, undo,"
                    " request, boot_id, since) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'attaching', ?, ?, ?, ?)",
                    (
                        owner.container_id,
                        owner.cni_ifname,
                        owner.pod.namespace,
                        owner.pod.name,
                        owner.pod.uid,
                        owner.netns.device,
                        owner.netns.inode,
                        netns_path,
                        ifname,
                        device,
                        resource_name,
                        json.dumps(undo.document()),
                        json.dumps(dict(request)),
                        self.boot_id,
                        now,
                    ),
                )
            except sqlite3.IntegrityError as error:
                raise DeviceBusy(f"{device} has an attachment in the ledger already") from error
            assert cursor.lastrowid is not None
            return Attachment(
                attachment_id=cursor.lastrowid,
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
                since=now,
            )

        return self._write(write, durable)

    def finish_attach(self, attachment_ids: Iterable[int], result: Mapping[str, Any]) -> None:
        """Turn *attaching* rows into *attached*, with the CNI result that will be answered."""
        ids = tuple(attachment_ids)
        text = json.dumps(dict(result))

        def write() -> None:
            now = self._clock()
            for attachment_id in ids:
                changed = self._db.execute(
                    "UPDATE attachments SET state = 'attached', result = ?, since = ?"
                    " WHERE attachment_id = ? AND state = 'attaching'",
                    (text, now, attachment_id),
                ).rowcount
                if changed != 1:
                    raise LedgerError(f"attachment {attachment_id} is not in state attaching")

        self._write(write, durable=False)

    def begin_detach(self, attachment_ids: Iterable[int]) -> None:
        """Mark rows *detaching*: a promise to undo them that survives a crash."""
        ids = [(attachment_id,) for attachment_id in attachment_ids]

        def write() -> None:
            now = self._clock()
            self._db.executemany(
                "UPDATE attachments SET state = 'detaching', since = ? WHERE attachment_id = ?",
                [(now, *row) for row in ids],
            )

        self._write(write, durable=False)

    def finish_detach(self, row: Attachment, *, lease_owed: bool = False) -> None:
        """Drop the row of a device that is back, and end its quarantine.

        With `lease_owed`, keep in the same step that its addresses are still to be given back.
        """

        def write() -> None:
            self._db.execute("DELETE FROM attachments WHERE attachment_id = ?", (row.attachment_id,))
            self._db.execute("DELETE FROM quarantine WHERE device = ?", (row.device,))
            if lease_owed:
                self._db.execute(
                    "INSERT INTO owed_leases (container_id, ifname, netns_path, request, since) VALUES (?, ?, ?, ?, ?)",
                    (row.owner.container_id, row.ifname, row.netns_path, json.dumps(dict(row.request)), self._clock()),
                )

        self._write(write, durable=False)

    def owed_leases(self) -> tuple[OwedLease, ...]:
        """List the addresses that are still to be given back, oldest first."""
        rows = self._read("SELECT * FROM owed_leases ORDER BY lease_id")
        return tuple(
            OwedLease(
                r["lease_id"], r["container_id"], r["ifname"], r["netns_path"], json.loads(r["request"]), r["since"]
            )
            for r in rows
        )

    def settle_lease(self, lease_id: int) -> None:
        """Forget addresses that were given back."""
        self._write(lambda: self._db.execute("DELETE FROM owed_leases WHERE lease_id = ?", (lease_id,)))

    def attachments(self) -> tuple[Attachment, ...]:
        """List all attachments, oldest first."""
        return self._attachments("")

    def attachments_of(self, container_id: str, cni_ifname: str) -> tuple[Attachment, ...]:
        """List what one CNI call's sandbox and interface owns."""
        return self._attachments("WHERE container_id = ? AND cni_ifname = ?", container_id, cni_ifname)

    def attachment_on(self, device: str) -> Attachment | None:
        """Return the attachment of a device, whoever owns it."""
        found = self._attachments("WHERE device = ?", device)
        return found[0] if found else None

    def _attachments(self, where: str, *values: str) -> tuple[Attachment, ...]:
        sql = f"SELECT * FROM attachments {where} ORDER BY attachment_id"  # noqa: S608 -- literals from above only
        return tuple(_attachment(row) for row in self._read(sql, values))

    # -------------------------------------------------------------- quarantine

    def quarantine(self, device: str, reason: str) -> None:
        """Withhold a device. A device that is withheld already keeps its first reason."""
        self._write(
            lambda: self._db.execute(
                "INSERT OR IGNORE INTO quarantine VALUES (?, ?, ?)", (device, reason, self._clock())
            )
        )

    def end_quarantine(self, device: str) -> None:
        """Offer a device again."""
        self._write(lambda: self._db.execute("DELETE FROM quarantine WHERE device = ?", (device,)))

    def quarantines(self) -> tuple[Quarantine, ...]:
        """List the withheld devices, by address."""
        rows = self._read("SELECT * FROM quarantine ORDER BY device")
        return tuple(Quarantine(row["device"], row["reason"], row["since"]) for row in rows)

    # ---------------------------------------------------------------- plumbing

    def _read(self, sql: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        with self._reading, self._usable():
            return self._reader.execute(sql, values).fetchall()

    def _write(self, work: Callable[[], T], durable: bool = True) -> T:
        with self._writing, self._usable():
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                value = work()
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            for listener in self._listeners:
                listener()
            return value

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        if not self._is_open:
            raise LedgerError(f"{self.path} is closed: the agent is ending")
        with self._translated():
            yield

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(f"{self.path}: {error}: free space or repair the disk; nothing was changed") from error

    def _connect(self) -> None:
        try:
            self._db = self._open_file()
        except sqlite3.OperationalError:
            raise  # the folder or the disk, not the content
        except sqlite3.DatabaseError as error:
            aside = self.path.with_name(f"{self.path.name}.damaged-{int(self._clock())}")
            log.error("the ledger is damaged; it is set aside and begun anew", extra={"path": str(aside)})
            log.error("damage: %s", error)
            for suffix in ("", "-wal", "-shm"):
                part = self.path.with_name(self.path.name + suffix)
                if part.exists():
                    part.rename(aside.with_name(aside.name + suffix))
            self.recovered_from = aside
            self._db = self._open_file()

    def _open_file(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            if (state := db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(state)
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise LedgerError(
                    f"{self.path} was written by a newer nodefabric (format {version}, this one knows"
                    f" {SCHEMA_VERSION}): install that version again, or move the file away with no pod on the node"
                )
            if version == 0:
                schema = importlib.resources.files("agent").joinpath("schema.sql").read_text()
                db.executescript(f"BEGIN; {schema} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        except BaseException:
            db.close()
            raise
        return db

    def _open_reader(self) -> sqlite3.Connection:
        reader = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        reader.row_factory = sqlite3.Row
        reader.execute("PRAGMA query_only = ON")
        return reader


def _pod(row: sqlite3.Row) -> PodRef:
    return PodRef(row["pod_namespace"], row["pod_name"], row["pod_uid"])


def _grant(row: sqlite3.Row) -> Grant:
    pod = _pod(row) if row["pod_name"] is not None else None
    return Grant(row["unit_id"], row["resource_name"], row["device"], row["granted_at"], pod)


def _attachment(row: sqlite3.Row) -> Attachment:
    return Attachment(
        attachment_id=row["attachment_id"],
        owner=Owner(
            row["container_id"], row["cni_ifname"], _pod(row), NetnsId(row["netns_device"], row["netns_inode"])
        ),
        ifname=row["ifname"],
        device=row["device"],
        resource_name=row["resource_name"],
        state=AttachmentState(row["state"]),
        undo=Undo.from_document(json.loads(row["undo"])),
        boot_id=row["boot_id"],
        netns_path=row["netns_path"],
        request=json.loads(row["request"]),
        result=json.loads(row["result"]) if row["result"] is not None else None,
        since=row["since"],
    )
