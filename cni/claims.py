"""What DRA claims bring into a pod's network: devices that were prepared for it before its sandbox was made.

kubelet prepares a claim once, for its first pod. Of a second pod of the same claim nobody tells, so its ADD finds out:
kubelet's PodResources says that the pod has the claim, and the API server for which pods it is reserved.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from agent.config import Config
from agent.config.networks import Network, network_of_keys
from agent.edits.claim_specs import ClaimSpecs
from agent.edits.metadata import requests_told
from agent.errors import DeviceBusy, Refused, Unavailable, UnknownUnit
from agent.kubelet.podresources import PodDevices
from agent.model.allocation import Attachment, AttachmentState, PodRef
from agent.model.claims import Claim, ClaimDevice, ClaimRef, ClaimState
from agent.model.fields import at, objects_at
from agent.model.network_data import network_data
from agent.state import Latest
from cni.grants import GrantedDevice, Holding
from cni.modes import rdma
from cni.node import Node

log = logging.getLogger(__name__)


class ClaimReader(Protocol):
    """Asks the API server. May be called on any thread but the event loop's."""

    def get(self, ref: ClaimRef) -> Mapping[str, Any] | None:
        """Read a claim; None if there is none of this UID. Raises Unavailable, and Refused."""


class AsksKubelet(Protocol):
    """Asks kubelet's PodResources. May be called on any thread but the event loop's."""

    def pod(self, pod: PodRef) -> PodDevices | None:
        """Ask what a pod holds; None if kubelet does not know it. Raises Unavailable."""


class Claims:
    """What a node without DRA has: nothing."""

    def devices(self, pod: PodRef) -> Sequence[GrantedDevice]:
        """List what prepared claims bring into a pod's network. Raises AgentError."""
        return ()

    def claimed(self, pod: PodRef, device: str) -> GrantedDevice | None:
        """Tell how a pod has a device by a claim; None if it has not."""
        return None

    def of_place(self, pod: PodRef, place: str) -> Sequence[GrantedDevice]:
        """List the devices that were chosen for a pod's claims where these have a place. Raises AgentError."""
        return ()

    def holding(self, pod: PodRef) -> Holding | None:
        """Tell which PCI devices a pod has by claims; None if it has none."""
        return None

    def entered(self, row: Attachment, netns: int) -> None:
        """Have the CDI spec of a row's claim name the character devices that its device has in its pod.

        Raises HardwareError if it has none any more, Unavailable if the spec cannot be written.
        """

    def attached(self, rows: Sequence[Attachment], result: Mapping[str, Any]) -> None:
        """Have the files that tell of claims' devices say what these are in the pod of some rows, as ADD is to answer.

        Raises Unavailable if one cannot be written.
        """


NO_CLAIMS = Claims()


class PodClaims(Claims):
    """The claims of the books. Methods block, and may be called on many threads at once, but not on the loop's."""

    def __init__(
        self,
        config: Latest[Config],
        node: Node,
        kubelet: AsksKubelet,
        specs: ClaimSpecs,
        reader: Latest[ClaimReader | None],
    ) -> None:
        """While there is no `reader` kubelet alone is believed on whose a claim is."""
        self._config = config
        self._node = node
        self._kubelet = kubelet
        self._specs = specs
        self._reader = reader
        self._telling = threading.Lock()
        """Held from a look at who else has a share until the file says so: the last of two ADDs sees both."""

    def devices(self, pod: PodRef) -> Sequence[GrantedDevice]:
        """List the VFs and whole adapters, and each HCA of which a share joins a network, once.

        A device to which there is admin access stays where it is.
        Raises DeviceBusy for a claim that is not prepared, or that kubelet knows and lost books do not; UnknownUnit for
        a device of a resource that is configured no more; Unavailable if kubelet does not answer.
        """
        self._refuse_forgotten(pod)
        found: dict[str, GrantedDevice] = {}
        for claim in self._claims_of(pod):
            for device in claim.devices:
                given = self._given(claim, device)
                if given is not None:
                    self._require_prepared(claim)
                    found.setdefault(given.device, given)
        return tuple(found.values())

    def claimed(self, pod: PodRef, device: str) -> GrantedDevice | None:
        """Tell how a pod has a device by a claim; None if it has not."""
        for claim in self._claims_of(pod):
            for each in claim.devices:
                if each.device == device and not each.admin:
                    return GrantedDevice(device, each.resource_name, None, claim_uid=claim.ref.uid)
        return None

    def of_place(self, pod: PodRef, place: str) -> Sequence[GrantedDevice]:
        """List the devices that were chosen for a pod's claims where these have a place, in the order of the results.

        Raises DeviceBusy for a claim that is not prepared, or that kubelet knows and lost books do not.
        """
        self._refuse_forgotten(pod)
        found = []
        for claim in self._claims_of(pod):
            for each in claim.devices:
                if each.device_name == place and not each.admin:
                    self._require_prepared(claim)
                    found.append(GrantedDevice(each.device, each.resource_name, None, claim_uid=claim.ref.uid))
        return found

    def holding(self, pod: PodRef) -> Holding | None:
        """Tell which PCI devices a pod has by claims; None if it has none."""
        claims = [claim for claim in self._claims_of(pod) if claim.state is ClaimState.PREPARED]
        devices = [device for claim in claims for device in claim.devices if not device.admin]
        if not devices:
            return None
        whole = frozenset(device.device for device in devices if device.exclusive)
        return Holding(whole, frozenset(device.device for device in devices) - whole)

    def entered(self, row: Attachment, netns: int) -> None:
        """Write the spec anew where the device came to other character devices than it had when it was prepared.

        Containers are created later, so they get those that it has now.
        """
        claim = self._node.ledger.claim(row.claim_uid)
        if claim is None:
            return  # unprepared meanwhile, and its spec is gone
        changed = {}
        for device in claim.devices:
            if device.device == row.device and device.cdi_name and not device.admin:
                edits = rdma.renumbered(self._node.host, row, netns, device.edits)
                if edits is not device.edits:
                    changed[device.cdi_name] = edits
        if changed:
            log.info("%s has other character devices in its pod: the CDI spec of its claim says so", row.device)
            self._node.ledger.set_claim_edits(claim.ref.uid, changed)
            self._specs.renew(partial(self._node.ledger.claim, claim.ref.uid))

    def attached(self, rows: Sequence[Attachment], result: Mapping[str, Any]) -> None:
        """Write the files that tell of the devices anew.

        A share that several pods have has another interface in each, and one file for all: of it none is told.
        """
        for uid in dict.fromkeys(row.claim_uid for row in rows if row.claim_uid):
            claim = self._node.ledger.claim(uid)
            if claim is not None and requests_told(claim):
                with self._telling:
                    self._specs.metadata.tell(uid, self._networks(claim, rows, result))

    def _networks(
        self, claim: Claim, rows: Sequence[Attachment], result: Mapping[str, Any]
    ) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
        """Map each request, and each of its devices that is in the pod of some rows, to what it is there."""
        pod = rows[0].owner.pod
        of_others = {
            parent_of(row)
            for row in self._node.ledger.attachments()
            if row.claim_uid == claim.ref.uid and row.state is not AttachmentState.DETACHING
            if not _same(row.owner.pod, pod)
        }
        mine = {parent_of(row): network_data(result, row.ifname).document() for row in rows}
        told, found = requests_told(claim), dict[str, dict[str, Mapping[str, Any]]]()
        for device in claim.devices:
            if device.request in told and device.device in mine and not device.admin:
                data = mine[device.device] if device.device not in of_others else {}
                found.setdefault(device.request, {})[device.device_name] = data
        return found

    # -------------------------------------------------------------------------------------------------- whose it is

    def _refuse_forgotten(self, pod: PodRef) -> None:
        """Refuse a pod that has a claim which is not in the books, where those are new: it would lack its devices."""
        ledger, config = self._node.ledger, self._config.value
        if not (config.offers_dra and pod.name and (ledger.is_new or ledger.recovered_from is not None)):
            return
        found = self._kubelet.pod(pod)
        known = {(claim.ref.namespace, claim.ref.name) for claim in ledger.claims()}
        for each in found.claimed if found is not None else ():
            if each.driver == config.dra.driver and (each.namespace, each.claim) not in known:
                raise DeviceBusy(
                    f"claim {each.namespace}/{each.claim} was prepared before the books were lost, and they do not know"
                    " its devices: recreate the pod, or restart kubelet, which has its claims prepared anew"
                )

    def _claims_of(self, pod: PodRef) -> Sequence[Claim]:
        ledger = self._node.ledger
        if not ledger.claims():
            return ()
        others = [
            claim
            for claim in ledger.claims()
            if not claim.only_pod and claim.ref.namespace == pod.namespace and not claim.is_for(pod)
        ]
        if others and pod.name:
            self._learn(others, pod)
        return ledger.claims_for(pod)

    def _learn(self, claims: Sequence[Claim], pod: PodRef) -> None:
        """Find out which of some claims are a pod's, too."""
        found = self._kubelet.pod(pod)
        told = {(each.namespace, each.claim) for each in found.claimed} if found is not None else set()
        for claim in claims:
            if (claim.ref.namespace, claim.ref.name) in told and (pods := self._pods_of(claim, pod)):
                self._node.ledger.set_claim_pods(claim.ref.uid, pods)

    def _pods_of(self, claim: Claim, pod: PodRef) -> Sequence[PodRef]:
        """List the pods of a claim that is a pod's, too, as kubelet has made sure before it started that.

        None if the claim is gone: the pod's is another one of this name.
        """
        reserved: list[PodRef] = []
        reader = self._reader.value
        try:
            document = reader.get(claim.ref) if reader is not None else None
            if document is not None:
                reserved = pods_of(document)
                reserved += [pod for pod in claim.pods if is_of_group(document) and pod not in reserved]
        except Refused as error:
            log.error("claim %s cannot be read, so its other pods are not known: %s", claim.ref, error)
        except Unavailable as error:
            log.info("claim %s is not read now: %s", claim.ref, error)
        else:
            if reader is not None and document is None:
                log.info("claim %s of the books is gone, and pod %s has another one of this name", claim.ref, pod)
                return ()
        pods = reserved or list(claim.pods)
        return pods if any(_same(each, pod) for each in pods) else [*pods, pod]

    # -------------------------------------------------------------------------------------------------- what it brings

    def _given(self, claim: Claim, device: ClaimDevice) -> GrantedDevice | None:
        """Tell what a device of a claim is set up with in a pod's network; None if it does not join one."""
        if device.admin:
            return None
        network = self._network(claim, device)
        if device.kind == "hca" and network is None:
            return None
        return GrantedDevice(
            device.device, device.resource_name, network, claim_uid=claim.ref.uid, ifname=device.ifname
        )

    def _network(self, claim: Claim, device: ClaimDevice) -> Network | None:
        if device.network:
            return network_of_keys(device.network).for_devices(device.kind)
        config = self._config.value
        if device.kind != "hca" and all(r.name != device.resource_name for r in config.resources):
            raise UnknownUnit(
                f"claim {claim.ref} has {device.device_name} of {device.resource_name}, and the configuration has no"
                " resource of this name any more, so it cannot come into the pod: put the resource back, or recreate"
                " the claim"
            )
        return config.network_of(device.resource_name)

    def _require_prepared(self, claim: Claim) -> None:
        if claim.state is not ClaimState.PREPARED:
            raise DeviceBusy(
                f"claim {claim.ref} is {claim.state}: its devices come into no pod until kubelet has had it prepared"
            )
        if claim.boot_id != self._node.ledger.boot_id:
            raise DeviceBusy(
                f"the devices of claim {claim.ref} have not been found again since the node was booted: kubelet is to"
                " have it prepared once more"
            )


def pods_of(document: Mapping[str, Any]) -> list[PodRef]:
    """List the pods that a claim is reserved for, as the API server has it. Raises Unavailable if that is no claim."""
    namespace = at(document, "metadata.namespace", str)
    return [
        PodRef(namespace, at(entry, "name", str), at(entry, "uid", str))
        for entry in objects_at(document, "status.reservedFor")
        if entry.get("resource") == "pods"
    ]


def is_of_group(document: Mapping[str, Any]) -> bool:
    """Tell whether a claim is reserved for a PodGroup (KEP-5729), whose pods are not named. Raises Unavailable."""
    return any(
        (entry.get("apiGroup"), entry.get("resource")) == ("scheduling.k8s.io", "podgroups")
        for entry in objects_at(document, "status.reservedFor")
    )


def parent_of(row: Attachment) -> str:
    """Name the device of a row, or that which its interface was made on."""
    return row.device.partition("/")[0]


def _same(one: PodRef, other: PodRef) -> bool:
    if one.uid and other.uid:
        return one.uid == other.uid
    return (one.namespace, one.name) == (other.namespace, other.name)
