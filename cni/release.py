"""Let go of a device by an operator's word: bring it back now, or forget it.

Safe against live pods: nothing is taken from a pod whose namespace lives, or which kubelet or the runtime
know, unless that is forced. What is forced is said loudly.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from agent.errors import AgentError, DeviceBusy, InUse, UnknownDevice
from agent.hardware.host import Host
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState
from cni.condition import PodKnown, is_nobodys, owner_alive
from cni.detach import Detacher
from cni.node import Node

LOCK_SECONDS = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wish:
    """What the operator wants."""

    device: str
    """A PCI address or another key of the ledger, or the name of the interface in the host."""
    reason: str
    force: bool = False


def release(node: Node, detacher: Detacher, wish: Wish, pod_known: PodKnown) -> str:
    """Release a device and tell what was done.

    Raises UnknownDevice for one that nobody has, InUse for one that a pod may still use, DeviceBusy, and
    AgentError if it cannot be brought back; it then stays as it was.
    """
    ledger = node.ledger
    device = _resolved(ledger, wish.device)
    with node.locks.hold([device], seconds=LOCK_SECONDS):
        row = ledger.attachment_on(device)
        if row is None:
            return _end_quarantine(node.host, ledger, device, wish)
        if row in detacher.leaving:
            raise DeviceBusy(f"{device} is on its way back already; see `nodefabric status`")
        holder = f"container {row.owner.container_id} of pod {row.owner.pod}"
        if not wish.force:
            _refuse_if_in_use(node, row, pod_known)
            log.warning("%s of %s is released by the operator: %s", device, holder, wish.reason)
        else:
            log.error("%s is TAKEN from %s by force of the operator: %s", device, holder, wish.reason)
        ledger.begin_detach([row.attachment_id])
        try:
            detacher.undo(row)
        except AgentError as error:
            if not wish.force:
                raise
            log.error("%s is FORGOTTEN though it is not back (%s), by force of the operator", device, error)
            ledger.finish_detach(row, lease_owed=row.request["network"] is not None)
            return f"{device} is forgotten though it is not back: {error}"
    return f"{device} is back, and free"


def _resolved(ledger: Ledger, name: str) -> str:
    rows, withheld = ledger.attachments(), ledger.quarantines()
    known = {row.device for row in rows} | {entry.device for entry in withheld}
    if name in known:
        return name
    if name.lower() in known:
        return name.lower()
    found = {row.device for row in rows if row.undo.netdev == name}
    if len(found) != 1:
        raise UnknownDevice(f"{name} is in no pod and not in quarantine; `nodefabric status` lists what is")
    return found.pop()


def _refuse_if_in_use(node: Node, row: Attachment, pod_known: PodKnown) -> None:
    if row.state is not AttachmentState.ATTACHED:
        return  # its end was promised, or its ADD has failed
    pod = row.owner.pod
    if is_nobodys(row) and owner_alive(node, row):
        raise InUse(
            f"{row.device} was found as {row.ifname} in the namespace at {row.netns_path}, and no pod is known to have"
            " it there, but something may: bring it back (`nsenter --net="
            f"{row.netns_path} ip link set {row.ifname} netns 1`) and it is free by itself, or use --force"
        )
    if owner_alive(node, row):
        raise InUse(f"{row.device} is in pod {pod}, whose network namespace lives: delete the pod, or use --force")
    known = pod_known(row)
    if known is None:
        raise InUse(
            f"{row.device} was given to pod {pod}, and kubelet cannot be asked whether that is gone:"
            " start kubelet, or use --force"
        )
    if known:
        raise InUse(f"{row.device} belongs to pod {pod}, which the node still knows: delete the pod, or use --force")


def _end_quarantine(host: Host, ledger: Ledger, device: str, wish: Wish) -> str:
    if host.find_netdev(device) is None and not wish.force:
        raise InUse(
            f"{device} has no interface in the host, so it cannot be verified to be clean: give it back to its"
            " network driver, or use --force"
        )
    log.warning("the quarantine of %s is ended by the operator: %s", device, wish.reason)
    ledger.end_quarantine(device)
    return f"{device} is withheld no more"
