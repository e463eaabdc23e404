"""Rows of the file as values of the model, and those as rows again.

A column is called as its field. What says more than one column can is in several, or in JSON.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from agent.errors import LedgerError
from agent.model.allocation import (
    Attachment,
    AttachmentState,
    Claim,
    ClaimRef,
    ClaimState,
    Hold,
    NetnsId,
    OwedLease,
    Owner,
    PodRef,
    Quarantine,
    Spec,
    Undo,
)
from agent.model.vf_identity import KnownDevice, Rail

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_OWED_BYTES = 4 << 20
"""Of all that is kept of owed leases. It is read each minute, and decoded may take twenty times as much; a network may
say whatever its author likes, and owes for each sandbox that its IPAM plugin fails."""

log = logging.getLogger(__name__)
T = TypeVar("T", bound="DataclassInstance")
Read = Callable[[str], Iterable[sqlite3.Row]]
"""Asks a file."""


def _value(kind: type[T], row: sqlite3.Row, **made: object) -> T:
    """Make a value of a row. `made` are the fields that are not in a column of their name as they are."""
    return kind(**{name: row[name] for name in _names(kind) if name not in made}, **made)


def _columns(value: DataclassInstance, *apart: str) -> dict[str, Any]:
    """Say a value as columns: each field, but for those that stand `apart`."""
    return cells(value, *_names(type(value), *apart))


@cache
def _names(kind: type[DataclassInstance], *apart: str) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name not in apart)


def cells(value: DataclassInstance, *names: str) -> dict[str, Any]:
    """Say some fields as columns, each of which stands in the one of its name."""
    found = {}
    for name in names:
        said = getattr(value, name)
        if said is not None and not isinstance(said, str | int | float):  # few are not
            said = json.dumps(dict(said) if isinstance(said, Mapping) else said)
        found[name] = said
    return found


def _pod(row: sqlite3.Row) -> PodRef:
    return PodRef(row["pod_namespace"], row["pod_name"], row["pod_uid"])


def _pod_columns(pod: PodRef | None) -> dict[str, Any]:
    return {f"pod_{name}": getattr(pod, name, None) for name in ("namespace", "name", "uid")}


def holds_and_claims(read: Read) -> tuple[tuple[Hold, ...], tuple[Claim, ...]]:
    """Read what units and slots there are, oldest first, and claims with theirs."""
    devices: dict[str, list[str]] = {}
    for row in read("SELECT * FROM hold_devices ORDER BY key, position"):
        devices.setdefault(row["key"], []).append(row["device"])
    found = [_hold(row, devices.get(row["key"], ())) for row in read("SELECT * FROM holds ORDER BY since, rowid")]
    of_claims: dict[str, list[Hold]] = {}
    for hold in found:
        of_claims.setdefault(hold.claim_uid, []).append(hold)
    claims = [
        _claim(row, of_claims.get(row["claim_uid"], ()))
        for row in read("SELECT * FROM claims ORDER BY namespace, name, claim_uid")
    ]
    return tuple(of_claims.get("", ())), tuple(claims)


def _hold(row: sqlite3.Row, devices: Iterable[str]) -> Hold:
    return _value(
        Hold,
        row,
        devices=tuple(devices),
        pod=_pod(row) if row["pod_name"] is not None else None,
        spec=Spec.from_document(json.loads(row["spec"]) if row["spec"] is not None else None),
        exclusive=bool(row["exclusive"]),
        admin=bool(row["admin"]),
        network=json.loads(row["network"]),
    )


def hold_columns(hold: Hold) -> dict[str, Any]:
    """Say a hold as a row of `holds`."""
    spec = json.dumps({name: getattr(hold.spec, name) for name in _names(Spec)}) if hold.spec is not None else None
    return {**_columns(hold, "devices", "pod", "spec"), **_pod_columns(hold.pod), "spec": spec}


def pod_of_hold(hold: Hold) -> dict[str, Any]:
    """Say in a row of `holds` whose it is."""
    return {"key": hold.key, **_pod_columns(hold.pod)}


def device_columns(hold: Hold) -> list[dict[str, Any]]:
    """Say the devices of a hold as rows of `hold_devices`."""
    alone = hold.is_slot or (hold.exclusive and not hold.admin)
    return [
        {"key": hold.key, "position": i, "device": device, "exclusive": alone} for i, device in enumerate(hold.devices)
    ]


def attachments(read: Read) -> tuple[Attachment, ...]:
    """Read what is in pods, oldest first.

    Raises LedgerError for a row whose undo record says what this version does not understand: left out, it
    would stay undone.
    """
    return tuple(map(_attachment, read("SELECT * FROM attachments ORDER BY attachment_id")))


def _attachment(row: sqlite3.Row) -> Attachment:
    try:
        return _value(
            Attachment,
            row,
            owner=_value(Owner, row, pod=_pod(row), netns=NetnsId(row["netns_device"], row["netns_inode"])),
            state=AttachmentState(row["state"]),
            undo=Undo.from_document(json.loads(row["undo"])),
            request=json.loads(row["request"]),
            result=json.loads(row["result"]) if row["result"] is not None else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(
            f"the attachment of {row['device']} in the ledger is not understood ({error}): install the version"
            " that wrote it again, and let it detach the device"
        ) from error


def attachment_columns(row: Attachment) -> dict[str, Any]:
    """Say an attachment as a row of `attachments`."""
    return {
        **_columns(row, "owner", "undo"),
        **_columns(row.owner, "pod", "netns"),
        **_pod_columns(row.owner.pod),
        "netns_device": row.owner.netns.device,
        "netns_inode": row.owner.netns.inode,
        "undo": json.dumps(row.undo.document()),
    }


def _claim(row: sqlite3.Row, devices: Iterable[Hold]) -> Claim:
    return _value(
        Claim,
        row,
        ref=ClaimRef(row["claim_uid"], row["namespace"], row["name"]),
        state=ClaimState(row["state"]),
        devices=tuple(devices),
        pods=tuple(PodRef(**pod) for pod in json.loads(row["pods"])),
    )


def claim_columns(claim: Claim) -> dict[str, Any]:
    """Say a claim as a row of `claims`."""
    ref = {"claim_uid": claim.ref.uid, "namespace": claim.ref.namespace, "name": claim.ref.name}
    return {**_columns(claim, "ref", "devices", "pods"), **ref, "pods": json.dumps([asdict(pod) for pod in claim.pods])}


def insert(db: sqlite3.Connection, table: str, columns: Iterable[Mapping[str, Any]], *, replace: bool = False) -> None:
    """Write rows as their columns; with `replace` in place of those with the same key, which keep their places.

    All rows have the same columns. Raises sqlite3.Error, IntegrityError for one that is there already.
    """
    if found := list(columns):
        db.executemany(_insertion(table, tuple(found[0]), replace), found)


def update(db: sqlite3.Connection, table: str, key: str, columns: Iterable[Mapping[str, Any]]) -> None:
    """Write rows that are there in place of what they said. All have the same columns. Raises sqlite3.Error."""
    if found := list(columns):
        db.executemany(_change(table, key, tuple(found[0])), found)


@cache
def _insertion(table: str, names: tuple[str, ...], replace: bool) -> str:
    values = ", ".join(f":{name}" for name in names)
    said = ", ".join(f"{name} = excluded.{name}" for name in names)
    instead = f" ON CONFLICT DO UPDATE SET {said}" if replace else ""
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({values}){instead}"  # noqa: S608 -- our own names


@cache
def _change(table: str, key: str, names: tuple[str, ...]) -> str:
    said = ", ".join(f"{name} = :{name}" for name in names if name != key)
    return f"UPDATE {table} SET {said} WHERE {key} = :{key}"  # noqa: S608 -- our own names


def quarantines(read: Read) -> tuple[Quarantine, ...]:
    """Read which devices are withheld, by address."""
    return tuple(_value(Quarantine, row) for row in read("SELECT * FROM quarantine ORDER BY device"))


def owe_lease(
    db: sqlite3.Connection, container_id: str, ifname: str, netns_path: str, request: Mapping[str, Any], since: float
) -> None:
    """Write a row of `owed_leases`, unless those that are there take too much room."""
    done = db.execute(
        "INSERT INTO owed_leases (container_id, ifname, netns_path, request, since)"
        " SELECT :container_id, :ifname, :netns_path, :request, :since"
        " WHERE (SELECT total(length(request)) FROM owed_leases) < :max_bytes",
        {
            "container_id": container_id,
            "ifname": ifname,
            "netns_path": netns_path,
            "request": json.dumps(dict(request)),
            "since": since,
            "max_bytes": MAX_OWED_BYTES,
        },
    )
    if not done.rowcount:
        log.error(
            "the addresses of %s in container %s will not be given back: pending leases take %d bytes already; see why"
            " (nodefabric status), and free them in the IPAM plugin by hand",
            ifname,
            container_id,
            MAX_OWED_BYTES,
        )


def owed_leases(read: Read, where: str = "") -> tuple[OwedLease, ...]:
    """Read which addresses are still to be given back, oldest first."""
    found = read(f"SELECT * FROM owed_leases {where} ORDER BY lease_id")  # noqa: S608 -- our own words
    return tuple(_value(OwedLease, row, request=json.loads(row["request"])) for row in found)


def known_devices(read: Read) -> tuple[KnownDevice, ...]:
    """Read what is known of VFs, by address."""
    return tuple(_value(KnownDevice, row) for row in read("SELECT * FROM known_devices ORDER BY device"))


def rails(read: Read) -> tuple[Rail, ...]:
    """Read the node's rails, by number and plane."""
    found = read("SELECT * FROM rails ORDER BY number, plane")
    return tuple(_value(Rail, row, is_named=bool(row["is_named"]), is_settled=bool(row["is_settled"])) for row in found)
