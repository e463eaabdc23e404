"""Rows of the file as values of the model."""

from __future__ import annotations

import functools
import json
import logging
import sqlite3
from collections.abc import Mapping
from typing import Any

from agent.errors import LedgerError
from agent.model.allocation import (
    Attachment,
    AttachmentState,
    Binding,
    Grant,
    NetnsId,
    OwedLease,
    Owner,
    PodRef,
    Quarantine,
    Undo,
)
from agent.model.known import KnownDevice

MAX_KEPT = 512
"""So many undo records are remembered as JSON: one VF's is mostly the same for one pod as for the next."""

MAX_OWED_BYTES = 4 << 20
"""Of all that is kept of owed leases. It is read each minute, and decoded may take twenty times as much; a network may
say whatever its author likes, and owes for each sandbox that its IPAM plugin fails."""

log = logging.getLogger(__name__)


def grant(row: sqlite3.Row) -> Grant:
    """Read a row of `grants`."""
    pod = _pod(row) if row["pod_name"] is not None else None
    return Grant(row["unit_id"], row["resource_name"], row["device"], row["granted_at"], pod)


def attachment(row: sqlite3.Row) -> Attachment:
    """Read a row of `attachments`.

    Raises LedgerError for one whose undo record says what this version does not understand: left out, it
    would stay undone.
    """
    try:
        return _attachment(row)
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(
            f"the attachment of {row['device']} in the ledger is not understood ({error}): install the version"
            " that wrote it again, and let it detach the device"
        ) from error


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


def binding(row: sqlite3.Row) -> Binding:
    """Read a row of `bindings`."""
    return Binding(
        unit_id=row["unit_id"],
        resource_name=row["resource_name"],
        kind=row["kind"],
        device=row["device"],
        container=row["container"],
        container_id=row["container_id"],
        cni_ifname=row["cni_ifname"],
        pod=_pod(row),
        edits=json.loads(row["edits"]),
        boot_id=row["boot_id"],
        since=row["since"],
    )


def said_of(row: Attachment) -> dict[str, Any]:
    """Say all of an attachment in plain values, as JSON holds them."""
    return {**_lasting_of(row), "undo": row.undo.document(), **_changing_of(row)}


def lasting_text(row: Attachment) -> str:
    """Say what `finish_attach` does not change, as JSON. A pod waits for it."""
    return f'{json.dumps(_lasting_of(row))[:-1]}, "undo": {_undo_text(row.undo)}}}'


def changing_text(row: Attachment) -> str:
    """Say what `finish_attach` changes, as JSON."""
    if row.result is None:
        return f'{{"state": "{row.state}", "result": null, "since": {row.since!r}}}'
    return json.dumps(_changing_of(row))


@functools.lru_cache(MAX_KEPT)
def _undo_text(undo: Undo) -> str:
    return json.dumps(undo.document())


def _lasting_of(row: Attachment) -> dict[str, Any]:
    return {
        "container_id": row.owner.container_id,
        "cni_ifname": row.owner.cni_ifname,
        "pod_namespace": row.owner.pod.namespace,
        "pod_name": row.owner.pod.name,
        "pod_uid": row.owner.pod.uid,
        "netns_device": row.owner.netns.device,
        "netns_inode": row.owner.netns.inode,
        "netns_path": row.netns_path,
        "ifname": row.ifname,
        "device": row.device,
        "resource_name": row.resource_name,
        "request": row.request,
        "boot_id": row.boot_id,
    }


def _changing_of(row: Attachment) -> dict[str, Any]:
    return {"state": str(row.state), "result": row.result, "since": row.since}


def insert_attachment(db: sqlite3.Connection, attachment_id: int, said: Mapping[str, Any]) -> None:
    """Write an attachment of which `said_of` told. Raises sqlite3.Error, IntegrityError if its device has one."""
    _execute(db, attachment_id, said, "")


def put_attachment(db: sqlite3.Connection, attachment_id: int, said: Mapping[str, Any]) -> None:
    """Write an attachment of which `said_of` told, in place of one with the same ID. Raises sqlite3.Error."""
    newer = ", ".join(f"{name} = excluded.{name}" for name in said)
    _execute(db, attachment_id, said, f" ON CONFLICT (attachment_id) DO UPDATE SET {newer}")


def _execute(db: sqlite3.Connection, attachment_id: int, said: Mapping[str, Any], otherwise: str) -> None:
    columns: dict[str, Any] = {"attachment_id": attachment_id, **said}
    for name in ("undo", "request", "result"):
        columns[name] = json.dumps(columns[name]) if columns[name] is not None else None
    names, values = ", ".join(columns), ", ".join("?" * len(columns))
    sql = f"INSERT INTO attachments ({names}) VALUES ({values})"  # noqa: S608 -- the names are the schema's
    db.execute(sql + otherwise, tuple(columns.values()))


def put_said(db: sqlite3.Connection, said: Mapping[int, Mapping[str, Any]]) -> None:
    """Write what a journal says, as far as the database can hold it. Raises sqlite3.Error."""
    for attachment_id, word in said.items():
        try:
            put_attachment(db, attachment_id, word)
        except sqlite3.IntegrityError as error:
            log.error("the attachment of %s in the journal is passed over: %s", word.get("device"), error)


def quarantine(row: sqlite3.Row) -> Quarantine:
    """Read a row of `quarantine`."""
    return Quarantine(row["device"], row["reason"], row["since"], row["boot_id"])


def owe_lease(
    db: sqlite3.Connection, container_id: str, ifname: str, netns_path: str, request: Mapping[str, Any], since: float
) -> None:
    """Write a row of `owed_leases`, unless those that are there take too much room."""
    done = db.execute(
        "INSERT INTO owed_leases (container_id, ifname, netns_path, request, since) SELECT ?, ?, ?, ?, ?"
        " WHERE (SELECT total(length(request)) FROM owed_leases) < ?",
        (container_id, ifname, netns_path, json.dumps(dict(request)), since, MAX_OWED_BYTES),
    )
    if not done.rowcount:
        log.error(
            "the addresses of %s in container %s will not be given back: what is owed takes %d bytes already; see why"
            " (nodefabric status), and free them in the IPAM plugin by hand",
            *(ifname, container_id, MAX_OWED_BYTES),
        )


def owed_lease(row: sqlite3.Row) -> OwedLease:
    """Read a row of `owed_leases`."""
    return OwedLease(
        lease_id=row["lease_id"],
        container_id=row["container_id"],
        ifname=row["ifname"],
        netns_path=row["netns_path"],
        request=json.loads(row["request"]),
        since=row["since"],
        tried_at=row["tried_at"],
        problem=row["problem"],
    )


def known_device(row: sqlite3.Row) -> KnownDevice:
    """Read a row of `known_devices`."""
    return KnownDevice(row["device"], row["identity"], row["netdev"], row["mac"], row["mtu"], row["boot_id"])


def _pod(row: sqlite3.Row) -> PodRef:
    return PodRef(row["pod_namespace"], row["pod_name"], row["pod_uid"])
