"""Rows of the file as values of the model, and those as rows again, column by column."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

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

MAX_OWED_BYTES = 4 << 20
"""Of all that is kept of owed leases. It is read each minute, and decoded may take twenty times as much; a network may
say whatever its author likes, and owes for each sandbox that its IPAM plugin fails."""

log = logging.getLogger(__name__)


def grant(row: sqlite3.Row) -> Grant:
    """Read a row of `grants`."""
    pod = _pod(row) if row["pod_name"] is not None else None
    said = json.loads(row["spec"]) if row["spec"] is not None else None
    spec = UnitSpec(**{**said, "beside": tuple(said["beside"])}) if said is not None else None
    others = tuple(json.loads(row["others"]))
    return Grant(row["unit_id"], row["resource_name"], row["device"], row["granted_at"], pod, spec, others)


def grant_columns(grant: Grant) -> dict[str, Any]:
    """Say a grant as a row of `grants`."""
    pod = grant.pod
    return {
        "unit_id": grant.unit_id,
        "resource_name": grant.resource_name,
        "device": grant.device,
        "granted_at": grant.granted_at,
        "pod_namespace": pod.namespace if pod is not None else None,
        "pod_name": pod.name if pod is not None else None,
        "pod_uid": pod.uid if pod is not None else None,
        "spec": _spec_column(grant.spec),
        "others": json.dumps(grant.others),
    }


def _spec_column(spec: UnitSpec | None) -> str | None:
    if spec is None:
        return None
    said = {"kind": spec.kind, "beside": spec.beside, "edits": dict(spec.edits), "told": dict(spec.told)}
    if spec.nodes:
        said["nodes"] = {device: list(nodes) for device, nodes in spec.nodes.items()}
    return json.dumps(said)


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
        claim_uid=row["claim_uid"],
    )


def attachment_columns(row: Attachment) -> dict[str, Any]:
    """Say an attachment as a row of `attachments`."""
    return {
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
        "claim_uid": row.claim_uid,
    }


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


def binding_columns(binding: Binding) -> dict[str, Any]:
    """Say a binding as a row of `bindings`."""
    return {
        "unit_id": binding.unit_id,
        "resource_name": binding.resource_name,
        "kind": binding.kind,
        "device": binding.device,
        "container": binding.container,
        "container_id": binding.container_id,
        "cni_ifname": binding.cni_ifname,
        "pod_namespace": binding.pod.namespace,
        "pod_name": binding.pod.name,
        "pod_uid": binding.pod.uid,
        "edits": json.dumps(dict(binding.edits)),
        "boot_id": binding.boot_id,
        "since": binding.since,
    }


def claims(of_claims: Iterable[sqlite3.Row], of_devices: Iterable[sqlite3.Row]) -> tuple[Claim, ...]:
    """Read the rows of `claims`, each with its rows of `claim_devices`, in the order in which both come."""
    devices: dict[str, list[ClaimDevice]] = {}
    for row in of_devices:
        devices.setdefault(row["claim_uid"], []).append(_claim_device(row))
    return tuple(
        Claim(
            ref=ClaimRef(row["claim_uid"], row["namespace"], row["name"]),
            state=ClaimState(row["state"]),
            devices=tuple(devices.get(row["claim_uid"], ())),
            pods=tuple(PodRef(pod["namespace"], pod["name"], pod["uid"]) for pod in json.loads(row["pods"])),
            only_pod=row["only_pod"],
            boot_id=row["boot_id"],
            since=row["since"],
        )
        for row in of_claims
    )


def claim_columns(claim: Claim) -> dict[str, Any]:
    """Say a claim as a row of `claims`."""
    return {
        "claim_uid": claim.ref.uid,
        "namespace": claim.ref.namespace,
        "name": claim.ref.name,
        "pods": json.dumps([{"namespace": pod.namespace, "name": pod.name, "uid": pod.uid} for pod in claim.pods]),
        "only_pod": claim.only_pod,
        "state": str(claim.state),
        "boot_id": claim.boot_id,
        "since": claim.since,
    }


def _claim_device(row: sqlite3.Row) -> ClaimDevice:
    return ClaimDevice(
        request=row["request"],
        pool=row["pool"],
        device_name=row["device_name"],
        resource_name=row["resource_name"],
        kind=row["kind"],
        device=row["device"],
        cdi_name=row["cdi_name"],
        share_id=row["share_id"],
        exclusive=bool(row["exclusive"]),
        admin=bool(row["admin"]),
        identity=row["identity"],
        network=json.loads(row["network"]),
        ifname=row["ifname"],
        edits=json.loads(row["edits"]),
        shares=row["shares"],
    )


def claim_device_columns(claim: Claim) -> list[dict[str, Any]]:
    """Say the devices of a claim as rows of `claim_devices`."""
    return [
        {
            "claim_uid": claim.ref.uid,
            "request": found.request,
            "pool": found.pool,
            "device_name": found.device_name,
            "share_id": found.share_id,
            "resource_name": found.resource_name,
            "kind": found.kind,
            "device": found.device,
            "identity": found.identity,
            "exclusive": int(found.exclusive),
            "admin": int(found.admin),
            "network": json.dumps(dict(found.network)),
            "ifname": found.ifname,
            "cdi_name": found.cdi_name,
            "edits": json.dumps(dict(found.edits)),
            "shares": found.shares,
        }
        for found in claim.devices
    ]


def insert(db: sqlite3.Connection, table: str, columns: Iterable[Mapping[str, Any]], *, anew: bool = False) -> None:
    """Write rows as their columns; with `anew` in place of those with the same key.

    All rows have the same columns. Raises sqlite3.Error, IntegrityError for one that is there already.
    """
    found = list(columns)
    if not found:
        return
    names, values = ", ".join(found[0]), ", ".join(f":{name}" for name in found[0])
    how = "INSERT OR REPLACE" if anew else "INSERT"
    db.executemany(f"{how} INTO {table} ({names}) VALUES ({values})", found)


def quarantine(row: sqlite3.Row) -> Quarantine:
    """Read a row of `quarantine`."""
    return Quarantine(row["device"], row["reason"], row["since"], row["boot_id"])


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


def rail(row: sqlite3.Row) -> Rail:
    """Read a row of `rails`."""
    known = row["number"], row["device"], row["identity"], row["netdev"], bool(row["is_named"])
    return Rail(*known, plane=row["plane"], is_settled=bool(row["is_settled"]))


def _pod(row: sqlite3.Row) -> PodRef:
    return PodRef(row["pod_namespace"], row["pod_name"], row["pod_uid"])
