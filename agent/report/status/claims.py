"""The part of the status document about claims and the DRA driver. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from agent.model.allocation import Attachment, AttachmentState, Claim, ClaimDevice, ClaimState
from agent.report.dra import DriverState


def claims_part(
    driver: DriverState | None, claims: Sequence[Claim], attachments: Iterable[Attachment]
) -> dict[str, Any]:
    """Describe driver and claims. A node that has neither is not told of them."""
    found: dict[str, Any] = {}
    if driver is not None:
        found["dra"] = {
            "driver": driver.name,
            "registered": driver.is_registered,
            "problem": driver.problem or None,
            "slices": driver.slices,
            "dropped": sorted(driver.dropped),
            "devices": [
                {"resource": resource, "health": health, "count": count} for resource, health, count in driver.devices
            ],
        }
    if driver is not None or claims:
        rows = [row for row in attachments if row.claim_uid]
        found["claims"] = [_claim(claim, [row for row in rows if row.claim_uid == claim.ref.uid]) for claim in claims]
    return found


def state_of(claim: Claim, device: ClaimDevice, rows: Iterable[Attachment]) -> str:
    """Name the state of a claim's device: that of its move if it is in a pod or on its way, else the claim's."""
    states = {row.state for row in rows if not device.admin and row.parent == device.device}
    if states and claim.state is not ClaimState.UNPREPARING:
        return (AttachmentState.ATTACHED if AttachmentState.ATTACHED in states else min(states)).value
    return claim.state.value


def _claim(claim: Claim, rows: Sequence[Attachment]) -> dict[str, Any]:
    return {
        "namespace": claim.ref.namespace,
        "name": claim.ref.name,
        "uid": claim.ref.uid,
        "state": claim.state.value,
        "since": claim.since,
        "pods": [str(pod) for pod in claim.pods],
        "devices": [_device(claim, device, rows) for device in claim.devices],
    }


def _device(claim: Claim, device: ClaimDevice, rows: Sequence[Attachment]) -> dict[str, Any]:
    return {
        "request": device.request,
        "name": device.device_name,
        "device": device.device,
        "resource": device.resource_name,
        "kind": device.kind,
        "admin": device.admin,
        "state": state_of(claim, device, rows),
        **({"share": device.share_id} if device.share_id else {}),
    }
