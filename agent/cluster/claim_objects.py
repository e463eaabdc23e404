"""ResourceClaims at the API server: what is read for them, and the status that they get once a pod has the devices."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from agent.cluster.apiserver import CLAIM, NODE, POD, SLICE, ApiServer, on_own_thread
from agent.cluster.keeper import Keeper
from agent.errors import AgentError, Conflicted, Refused, Unavailable
from agent.ledger import Ledger
from agent.model.allocation import (
    Attachment,
    AttachmentState,
    Claim,
    ClaimRef,
    Hold,
    NetworkData,
    PodRef,
    network_data,
)
from agent.model.device import Snapshot
from agent.model.fields import at, objects_at
from agent.offer.offer import Offer
from agent.process.backoff import Backoff
from agent.report.report import Report
from agent.state import Latest

COALESCE_SECONDS = 0.2
RETRY = Backoff(first=1.0, longest=300.0, jitter=0.1)
AWAY_SECONDS = 30.0
"""So long at most an API server that does not answer is left alone: claims of new pods wait for it, too."""
CONDITION = "claim-status"

log = logging.getLogger(__name__)


Entry = Mapping[str, Any]
"""What `status.devices` of a claim says of a device that is in a pod now."""
_KEY = ("driver", "pool", "device", "shareID")
"""Distinguishes the entries of one claim."""


def entry(driver: str, device: Hold, since: float, network: NetworkData, data: Mapping[str, str]) -> Entry:
    """Write what a claim's status says of a device that is ready since this moment (since the epoch)."""
    where = f"as {network.interface}" if network.interface else "without an interface"
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Attached",
        "message": f"the device is in the pod {where}",
        "lastTransitionTime": datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    found = {
        "driver": driver,
        "pool": device.pool,
        "device": device.device_name,
        "shareID": device.share_id,
        "conditions": [ready],
        "networkData": network.document(),
        "data": {key: value for key, value in data.items() if value},
    }
    return {key: value for key, value in found.items() if value}


@dataclass(slots=True)
class _Status:
    """A claim that is prepared, and what its status is to say."""

    ref: ClaimRef
    devices: dict[tuple[str | None, ...], Entry] = field(default_factory=dict)
    due: float | None = None
    failures: int = 0
    said: str = ""
    """The refusal that was logged last."""
    written: tuple[Entry, ...] = ()
    by_update: bool = False
    """The server would call its allocation changed by any patch."""


class ClaimStatus(Keeper):
    """Keeps status.devices of claims as the books say, with one write for what comes together.

    `attached` and `forget` may be called from any thread, and wait for nothing.
    """

    def __init__(
        self, api: ApiServer, report: Report, coalesce: float = COALESCE_SECONDS, retry: Backoff = RETRY
    ) -> None:
        """`coalesce`: how many seconds to wait for what comes together."""
        super().__init__(retry)
        self._api = api
        self._metrics = report.metrics
        self._conditions = report.conditions
        self._coalesce = coalesce
        self._guard = threading.Lock()
        self._claims: dict[str, _Status] = {}
        self._has_begun = self._is_over = False

    async def follow(self, ledger: Ledger, driver: str, offer: Latest[Offer]) -> None:
        """Follow the books from the first scan on, and write what there is. A second call changes nothing."""

        def attachment(before: Attachment | None, row: Attachment | None) -> None:
            if self._is_over or row is None or not row.claim_uid or row.state is not AttachmentState.ATTACHED:
                return
            found = ledger.claim(row.claim_uid)
            if found is not None:
                self.attached(found.ref, *attached(driver, found, row, offer.value.snapshot))

        def claim(before: Claim | None, after: Claim | None) -> None:
            if before is not None and after is None:
                self.forget(before.ref.uid)

        while not (first := offer.value).snapshot.generation:
            await offer.other_than(first)
        if self._has_begun:
            return
        self._has_begun = True
        ledger.watch_attachments(attachment)
        ledger.watch_claims(claim)
        for row in ledger.attachments():
            attachment(None, row)

    def end(self) -> None:
        """Follow the books no more."""
        self._is_over = True

    def attached(self, claim: ClaimRef, *devices: Entry) -> None:
        """Say that devices of a claim are in a pod. The same again is no news."""
        with self._guard:
            status = self._claims.setdefault(claim.uid, _Status(claim))
            status.devices |= {tuple(map(device.get, _KEY)): device for device in devices}
            if tuple(status.devices.values()) == status.written:
                return
            if status.due is None:
                status.due = time.monotonic() + self._coalesce
        self.changed()

    def forget(self, claim_uid: str) -> None:
        """Say that a claim is unprepared. The server removes the status when it takes the devices back."""
        with self._guard:
            self._claims.pop(claim_uid, None)
        self._show()

    async def run(self) -> None:
        """Write until cancelled. Errors of ours are waited out."""
        try:
            await super().run()
        finally:
            self._conditions.set(CONDITION, None)

    async def _work(self, now: float) -> float:
        with self._guard:
            due = [status for status in self._claims.values() if status.due is not None and status.due <= now]
        for status in due:
            try:
                await self._write(status)
            except Refused as refused:
                self._refused(status, refused, now)
        self._went_well()
        with self._guard:
            return min((status.due for status in self._claims.values() if status.due is not None), default=math.inf)

    def _failed(self, error: AgentError, pause: float) -> float:
        log.info("the status of claims is written later: %s", error)
        return min(pause, AWAY_SECONDS * (1 - self.chance() / 10))  # nodes do not all ask at once

    async def _write(self, status: _Status) -> None:
        with self._guard:
            status.due, devices = None, tuple(status.devices.values())
        if devices == status.written:
            return
        try:
            await on_own_thread(self._send, status, devices)
        except Unavailable as error:
            self._metrics.api_write(CLAIM.kind, error.reason)
            with self._guard:
                status.due = status.due or 0.0
                if self._claims.get(status.ref.uid) is status:  # others come first at the next attempt
                    self._claims[status.ref.uid] = self._claims.pop(status.ref.uid)
            raise
        self._metrics.api_write(CLAIM.kind, "accepted")
        status.written, status.failures, status.said = devices, 0, ""
        self._show()

    def _send(self, status: _Status, devices: Sequence[Entry]) -> None:
        """Write a claim's devices. On a thread of its own. Raises Unavailable, and Refused with 404 if it is gone.

        By a patch, unless that is refused as a change of the allocation: the server encodes the allocation's parameters
        again for each kind of patch, with their keys sorted, and then finds them changed where they were not sorted
        (seen on Kubernetes 1.36). Replaced as a whole, with the allocation as it was read, the status is accepted.
        """
        ref = status.ref
        if not status.by_update:
            document = {
                "apiVersion": CLAIM.api_version,
                "kind": CLAIM.kind,
                "metadata": {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid},
                "status": {"devices": devices},
            }
            try:
                self._api.apply_status(CLAIM.within(ref.namespace), document)
            except Refused as refused:
                if not _is_of_allocation(refused):
                    raise
                status.by_update = True
            else:
                return
        self._replace(ref, devices)

    def _replace(self, ref: ClaimRef, devices: Sequence[Entry]) -> None:
        kind = CLAIM.within(ref.namespace)
        found = self._api.current(kind, ref.name)
        if found is None or at(found, "metadata.uid", str) != ref.uid:
            raise Refused(HTTPStatus.NOT_FOUND, f"claim {ref} was deleted")
        drivers = {device["driver"] for device in devices}
        others = [each for each in objects_at(found, "status.devices") if each.get("driver") not in drivers]
        found["status"] = {**at(found, "status", dict, {}), "devices": [*others, *devices]}
        try:
            self._api.replace_status(kind, found, blanks=False)
        except Refused as refused:
            if not _is_of_allocation(refused):
                raise
            self._api.replace_status(kind, found, blanks=True)

    def _show(self) -> None:
        """Show a claim that is refused, if there is one."""
        with self._guard:
            refused = next((status for status in self._claims.values() if status.said), None)
        what = None if refused is None else f"the status of claim {refused.ref} is not written: {refused.said}"
        self._conditions.set(CONDITION, what)

    def _refused(self, status: _Status, error: Refused, now: float) -> None:
        """Try this claim again later, unless it is gone."""
        if error.status == HTTPStatus.NOT_FOUND:
            self.forget(status.ref.uid)
            return
        status.failures += 1
        pause = self._retry.after(status.failures, chance=self.chance())
        if not isinstance(error, Conflicted):  # of the next version it may be accepted
            if str(error) != status.said:
                status.said = str(error)
                extra = {"reason": error.reason}
                log.warning("the status of claim %s is not written: %s", status.ref, error, extra=extra)
                self._show()
            if _is_of_allocation(error):
                pause = self._retry.longest  # neither time nor other devices make that better
        with self._guard:
            status.due = now + pause


def _is_of_allocation(error: Refused) -> bool:
    """Whether a status was refused because the allocation in it would differ."""
    is_invalid = error.status == HTTPStatus.UNPROCESSABLE_ENTITY
    return is_invalid and "status.allocation" in str(error) and "immutable" in str(error)


class ClaimObjects:
    """Reads these. Blocks: call it from a thread, and from as many as the client has requests at once."""

    def __init__(self, api: Callable[[], ApiServer], node_name: str) -> None:
        """`api` returns the client, or raises Unavailable. It may wait."""
        self._api = api
        self._node_name = node_name

    def get(self, ref: ClaimRef) -> Mapping[str, Any] | None:
        """Read a claim as it is now, not as a cache has it; None if there is none, or another one of its name.

        Raises Unavailable, and Refused without the right to read.
        """
        found = self.claim(ref.namespace, ref.name)
        return found if found is not None and at(found, "metadata.uid", str) == ref.uid else None

    def pod(self, pod: PodRef) -> Mapping[str, Any] | None:
        """Read a pod; None if there is none, or another one of its name. Raises Unavailable."""
        found = self._api().current(POD.within(pod.namespace), pod.name)
        return found if found is not None and pod.uid in ("", at(found, "metadata.uid", str)) else None

    def claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Read a claim, whatever its UID; None if there is none. Raises Unavailable."""
        return self._api().current(CLAIM.within(namespace), name)

    def slices(self, driver: str) -> Sequence[Mapping[str, Any]]:
        """List this node's ResourceSlices of a driver. Raises Unavailable."""
        selector = {"spec.driver": driver, "spec.nodeName": self._node_name}
        _, found = self._api().list_of(SLICE, selector, dict)
        return found


def attached(driver: str, claim: Claim, row: Attachment, snapshot: Snapshot) -> Iterator[Entry]:
    """Say what an attachment of a claim is, once for each result that it stands for. Pure."""
    network = network_data(row.result or {}, row.ifname)
    for device in claim.devices:
        if not device.admin and device.device == row.parent:
            data = {
                "pciAddress": device.device,
                "rdmaDevice": row.undo.rdma or _shared_rdma_device(device.device, snapshot),
                "network": str((row.request.get("network") or {}).get("name", "")),
            }
            yield entry(driver, device, row.since, network, data)


def _shared_rdma_device(address: str, snapshot: Snapshot) -> str:
    """Name the RDMA device that a pod uses in the host's namespace; empty if there is none, or none is shared."""
    found = snapshot.by_address.get(address) if not snapshot.rdma_exclusive else None
    return next((rdma.name for rdma in found.rdma_devices), "") if found is not None else ""


def kubelet_version(api: ApiServer, node_name: str) -> str:
    """Ask for the version of the node's kubelet; empty if that is not answered. Blocks."""
    try:
        return at(api.get(NODE, node_name), "status.nodeInfo.kubeletVersion", str, "")
    except Unavailable:
        return ""
