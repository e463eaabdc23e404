"""Rows of the file as values of the model."""

from __future__ import annotations

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


def insert_attachment(db: sqlite3.Connection, row: Attachment) -> None:
    """Write an attachment. Raises sqlite3.Error, IntegrityError if its device has one."""
    columns = {
        "attachment_id": row.attachment_id,
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
        "state": str(row.state),
        "undo": json.dumps(row.undo.document()),
        "boot_id": row.boot_id,
        "request": json.dumps(row.request),
        "result": json.dumps(row.result) if row.result is not None else None,
        "since": row.since,
    }
    insert_columns(db, columns)


def insert_columns(db: sqlite3.Connection, columns: Mapping[str, Any]) -> None:
    """Write an attachment as its columns. Raises sqlite3.Error, IntegrityError if its device has one."""
    names, values = ", ".join(columns), ", ".join(f":{name}" for name in columns)
    db.execute(f"INSERT INTO attachments ({names}) VALUES ({values})", columns)  # noqa: S608 -- the schema's names


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
