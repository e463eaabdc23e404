"""Rows of the file as values of the model, and those as rows again.

A column is called as its field. What says more than one column can is in several, or in JSON.
"""

from __future__ import annotations

import functools
import json
import logging
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from agent.errors import LedgerError
from agent.model.allocation import (
    Attachment,
    AttachmentState,
    Binding,
    Claim,
    ClaimDevice,
    ClaimRef,
    ClaimState,
    Grant,
    NetnsId,
    OwedLease,
    Owner,
    PodRef,
    Quarantine,
    Undo,
    UnitSpec,
)
from agent.model.vf_identity import KnownDevice, Rail

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_OWED_BYTES = 4 << 20
"""Of all that is kept of owed leases. It is read each minute, and decoded may take twenty times as much; a network may
say whatever its author likes, and owes for each sandbox that its IPAM plugin fails."""

log = logging.getLogger(__name__)
T = TypeVar("T", bound="DataclassInstance")


def _value(kind: type[T], row: sqlite3.Row, **made: object) -> T:
    """Make a value of a row. `made` are the fields that are not in a column of their name as they are."""
    return kind(**{field.name: row[field.name] for field in fields(kind) if field.name not in made}, **made)


def _columns(value: DataclassInstance, *apart: str) -> dict[str, Any]:
    """Say a value as columns: each field, but for those that stand `apart`."""
    return cells(value, *_names(type(value), apart))


@functools.cache
def _names(kind: type[DataclassInstance], apart: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name not in apart)


def cells(value: DataclassInstance, *names: str) -> dict[str, Any]:
    """Say some fields as columns, each of which stands in the one of its name."""
    return {name: _cell(getattr(value, name)) for name in names}


def _cell(value: object) -> object:
    if value is None or isinstance(value, str | int | float):  # most of them, and quickly seen
        return value
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return json.dumps(value) if isinstance(value, tuple) else value


def _pod(row: sqlite3.Row) -> PodRef:
    return PodRef(row["pod_namespace"], row["pod_name"], row["pod_uid"])


def _pod_columns(pod: PodRef | None) -> dict[str, Any]:
    return {f"pod_{name}": getattr(pod, name, None) for name in ("namespace", "name", "uid")}


def grant(row: sqlite3.Row) -> Grant:
    """Read a row of `grants`."""
    pod = _pod(row) if row["pod_name"] is not None else None
    said = json.loads(row["spec"]) if row["spec"] is not None else None
    spec = UnitSpec(**{**said, "beside": tuple(said["beside"])}) if said is not None else None
    return _value(Grant, row, pod=pod, spec=spec, others=tuple(json.loads(row["others"])))


def grant_columns(grant: Grant) -> dict[str, Any]:
    """Say a grant as a row of `grants`."""
    return {**_columns(grant, "pod", "spec"), **_pod_columns(grant.pod), "spec": _spec_column(grant.spec)}


def _spec_column(spec: UnitSpec | None) -> str | None:
    if spec is None:
        return None
    said = {"kind": spec.kind, "beside": spec.beside, "edits": dict(spec.edits), "told": dict(spec.told)}
    return json.dumps({**said, "nodes": dict(spec.nodes)})


def attachment(row: sqlite3.Row) -> Attachment:
    """Read a row of `attachments`.

    Raises LedgerError for one whose undo record says what this version does not understand: left out, it
    would stay undone.
    """
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


def binding(row: sqlite3.Row) -> Binding:
    """Read a row of `bindings`."""
    return _value(Binding, row, pod=_pod(row), edits=json.loads(row["edits"]))


def binding_columns(binding: Binding) -> dict[str, Any]:
    """Say a binding as a row of `bindings`."""
    return {**_columns(binding, "pod"), **_pod_columns(binding.pod)}


def claims(of_claims: Iterable[sqlite3.Row], of_devices: Iterable[sqlite3.Row]) -> tuple[Claim, ...]:
    """Read the rows of `claims`, each with its rows of `claim_devices`, in the order in which both come."""
    devices: dict[str, list[ClaimDevice]] = {}
    for row in of_devices:
        devices.setdefault(row["claim_uid"], []).append(_claim_device(row))
    return tuple(
        _value(
            Claim,
            row,
            ref=ClaimRef(row["claim_uid"], row["namespace"], row["name"]),
            state=ClaimState(row["state"]),
            devices=tuple(devices.get(row["claim_uid"], ())),
            pods=tuple(PodRef(**pod) for pod in json.loads(row["pods"])),
        )
        for row in of_claims
    )


def claim_columns(claim: Claim) -> dict[str, Any]:
    """Say a claim as a row of `claims`."""
    ref = {"claim_uid": claim.ref.uid, "namespace": claim.ref.namespace, "name": claim.ref.name}
    return {**_columns(claim, "ref", "devices", "pods"), **ref, "pods": json.dumps([asdict(pod) for pod in claim.pods])}


def _claim_device(row: sqlite3.Row) -> ClaimDevice:
    return _value(
        ClaimDevice,
        row,
        exclusive=bool(row["exclusive"]),
        admin=bool(row["admin"]),
        network=json.loads(row["network"]),
        edits=json.loads(row["edits"]),
    )


def claim_device_columns(claim: Claim) -> list[dict[str, Any]]:
    """Say the devices of a claim as rows of `claim_devices`."""
    return [{"claim_uid": claim.ref.uid, **_columns(found)} for found in claim.devices]


def insert(db: sqlite3.Connection, table: str, columns: Iterable[Mapping[str, Any]], *, replace: bool = False) -> None:
    """Write rows as their columns; with `replace` in place of those with the same key.

    All rows have the same columns. Raises sqlite3.Error, IntegrityError for one that is there already.
    """
    found = list(columns)
    if not found:
        return
    names, values = ", ".join(found[0]), ", ".join(f":{name}" for name in found[0])
    how = "INSERT OR REPLACE" if replace else "INSERT"
    db.executemany(f"{how} INTO {table} ({names}) VALUES ({values})", found)


def update(db: sqlite3.Connection, table: str, key: str, columns: Iterable[Mapping[str, Any]]) -> None:
    """Write rows that are there in place of what they said. All have the same columns. Raises sqlite3.Error."""
    found = list(columns)
    if found:
        said = ", ".join(f"{name} = :{name}" for name in found[0] if name != key)
        db.executemany(f"UPDATE {table} SET {said} WHERE {key} = :{key}", found)  # noqa: S608 -- our own names


def quarantine(row: sqlite3.Row) -> Quarantine:
    """Read a row of `quarantine`."""
    return _value(Quarantine, row)


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


def owed_lease(row: sqlite3.Row) -> OwedLease:
    """Read a row of `owed_leases`."""
    return _value(OwedLease, row, request=json.loads(row["request"]))


def known_device(row: sqlite3.Row) -> KnownDevice:
    """Read a row of `known_devices`."""
    return _value(KnownDevice, row)


def rail(row: sqlite3.Row) -> Rail:
    """Read a row of `rails`."""
    return _value(Rail, row, is_named=bool(row["is_named"]), is_settled=bool(row["is_settled"]))
