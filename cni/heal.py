"""What is wrong with a row of the ledger, and putting that right: by itself, or by an operator's word.

`condition` looks at a row and decides; `Healer` finishes what a crash, a lost DEL or a reboot
left of an attachment. A driver may hang in the kernel, so a device comes back on a thread of its own, and the healer
goes on in time. `release` brings a device back now, or forgets it. It is safe against live pods: nothing is taken from
a pod whose namespace lives, or which kubelet or the runtime know, unless that is forced, which is logged as an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from agent.errors import AgentError, DeviceBusy, InUse, UnknownDevice
from agent.hardware import netns as namespaces
from agent.hardware.host import Host
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState, Withheld
from cni.call import Node
from cni.detach import Detacher
from cni.found_vfs import NOBODY, UNKNOWN
from cni.modes.choice import mode_of

HEAL_SECONDS = 60.0
"""How long healing waits for a device: at a start nobody is served before, and a driver may hang in the kernel."""
OTHERS_SECONDS = 1.0
"""And for each other one while one has taken longer: it may wait for the same."""
LOCK_SECONDS = 5.0
"""How long a release waits for whoever works on the device."""
REBOOTED = "rebooted"
OWNER_GONE = "owner-gone"
BROUGHT_BACK = "brought-back"
PodKnown = Callable[[Attachment], bool | None]
"""Tells whether kubelet or the runtime know a row's pod; None if they cannot be asked."""

log = logging.getLogger(__name__)


def condition(node: Node, row: Attachment) -> str | None:
    """Name what is wrong with a row: one word that says why it is undone. None if nothing is.

    The caller holds the device's lock, so nobody works on it. A namespace of the same number in another boot is
    another one. What an administrator had moved by hand and has brought back is free, though the namespace lives: no
    DEL will ever come for it. A device that is where only a living namespace can keep it is left alone, also where
    nobody sees that one.
    """
    if row.boot_id != node.ledger.boot_id:
        return REBOOTED
    if row.state is not AttachmentState.ATTACHED:
        return f"half-{row.state.value}"
    lives = namespaces.is_at(row.owner.netns, row.netns_path)
    if (lives and not is_nobodys(row)) or mode_of(row).away(node.host, row):
        return None
    return BROUGHT_BACK if lives else OWNER_GONE


def owner_alive(node: Node, row: Attachment) -> bool:
    """Return whether an attachment's pod may still use the device.

    The namespace at its path decides. Where that path cannot be seen, a device that is not back
    in the host still sits in a namespace that lives, and is left alone.
    """
    return condition(node, replace(row, state=AttachmentState.ATTACHED)) is None


def is_nobodys(row: Attachment) -> bool:
    """Return whether a device was found in a namespace, and neither container nor pod is known to have it there."""
    return row.owner.container_id == UNKNOWN and row.owner.pod == NOBODY and bool(row.undo.netdev)


class Healer:
    """Looks at rows, and brings back what nobody has any more. Methods block, and may run on many threads at once."""

    def __init__(self, node: Node, detacher: Detacher, seconds: float = HEAL_SECONDS) -> None:
        """`seconds` is how long `heal` waits for a device to be back."""
        self._node = node
        self._detacher = detacher
        self._seconds = seconds

    def heal(self, device: str) -> str | None:
        """Finish what a crash, a lost DEL or a reboot left of an attachment.

        Returns one word that says what was wrong, or None if all is well or somebody is at it.
        Raises AgentError if the device is still not back. One that takes too long is in quarantine until it is.
        """
        with ExitStack() as held:
            try:
                held.enter_context(self._node.locks.hold([device], seconds=0.2))
            except DeviceBusy:
                self._withhold_overdue(device)
                return None
            row = self._node.ledger.attachment_on(device)
            if row is None or row in self._detacher.leaving:
                return None
            reason = condition(self._node, row)
            if reason is None:
                return None
            log.warning("healing %s of container %s: %s", device, row.owner.container_id, reason)
            self._node.ledger.begin_detach([row.attachment_id])
            # After a reboot there may be many, the start waits for all, and plugins may hang. At other
            # times the relay may ask again for the same container, which must not meet its old lease.
            self._put_back_in_background(row, held.pop_all(), leases_later=reason == REBOOTED)
            return reason

    def _put_back_in_background(self, row: Attachment, lock: ExitStack, *, leases_later: bool) -> None:
        """Undo a row on a thread of its own, which lets go of the device's lock, and wait for it, but not for ever."""

        def work() -> None:
            with lock:
                self._detacher.undo(row, leases_later=leases_later)

        seconds = min(self._seconds, OTHERS_SECONDS) if self._detacher.leaving.has_overdue else self._seconds
        with ExitStack() as unless_started:
            unless_started.enter_context(lock)  # which a DEL waits for that has come just now
            done = self._detacher.leaving.start(row, work)
            if done is None:
                return
            unless_started.pop_all()
        if not wait([done], seconds).done:
            done.add_done_callback(partial(_log_late, row.device))
            self._withhold(row, seconds)
        done.result()

    def _withhold_overdue(self, device: str) -> None:
        """Withhold a device that a DEL has been bringing back for too long."""
        row = self._node.ledger.attachment_on(device)
        since = self._detacher.leaving.since(row) if row is not None else None
        if row is not None and since is not None and time.monotonic() > since + self._seconds:
            self._withhold(row, self._seconds)

    def _withhold(self, row: Attachment, seconds: float) -> None:
        late = f"is not back after {seconds:g} s"
        self._detacher.leaving.note_overdue(row)
        self._node.ledger.quarantine(row.device, Withheld.DRIVER_MAY_HANG.because(f"it {late}, look at dmesg"))
        current = self._node.ledger.attachment_on(row.device)
        if current is None or current.attachment_id != row.attachment_id:  # just now
            self._node.ledger.end_quarantine(row.device)
        raise DeviceBusy(f"{row.device} {late}: {Withheld.DRIVER_MAY_HANG}, look at dmesg")


def _log_late(device: str, done: Future[None]) -> None:
    """Log the end of work that nobody waits for any more."""
    if (error := done.exception()) is None:
        log.warning("healing %s is done at last", device)
    else:
        log.error("healing %s has failed at last: %s", device, error)


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """What the operator wants."""

    device: str
    """A PCI address or another key of the ledger, or the name of the interface in the host."""
    reason: str
    force: bool = False


def release(node: Node, detacher: Detacher, asked: ReleaseRequest, pod_known: PodKnown) -> str:
    """Release a device and tell what was done.

    Raises UnknownDevice for one that nobody has, InUse for one that a pod may still use, DeviceBusy, and
    AgentError if it cannot be brought back; it then stays as it was.
    """
    ledger = node.ledger
    device = _resolved(ledger, asked.device)
    with node.locks.hold([device], seconds=LOCK_SECONDS):
        row = ledger.attachment_on(device)
        if row is None:
            return _end_quarantine(node.host, ledger, device, asked)
        if row in detacher.leaving:
            raise DeviceBusy(f"{device} is on its way back already; see `nodefabric status`")
        holder = f"container {row.owner.container_id} of pod {row.owner.pod}"
        if not asked.force:
            _refuse_if_in_use(node, row, pod_known)
            log.warning("%s of %s is released by the operator: %s", device, holder, asked.reason)
        else:
            log.error("%s is TAKEN from %s by force of the operator: %s", device, holder, asked.reason)
        ledger.begin_detach([row.attachment_id])
        try:
            detacher.undo(row)
        except AgentError as error:
            if not asked.force:
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
        how = ledger.how_held(name.lower())
        where = f"{name} is {how}, and in no pod's network" if how else f"{name} is in no pod"
        raise UnknownDevice(f"{where} and not in quarantine; `nodefabric status` lists what is")
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


def _end_quarantine(host: Host, ledger: Ledger, device: str, asked: ReleaseRequest) -> str:
    if host.find_netdev(device) is None and not asked.force:
        raise InUse(
            f"{device} has no interface in the host, so it cannot be verified to be clean: give it back to its"
            " network driver, or use --force"
        )
    log.warning("the quarantine of %s is ended by the operator: %s", device, asked.reason)
    ledger.end_quarantine(device)
    return f"{device} leaves quarantine"
