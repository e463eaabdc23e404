"""VFs without a row: remembered as they are, put back under their own names, or looked for in namespaces.

And devices in quarantine that are clean again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from agent.errors import AgentError
from agent.ledger import Ledger
from agent.model.allocation import PodRef, Quarantine
from agent.model.device import PciDevice, Snapshot, is_pci_address
from agent.model.vf_identity import KnownDevice, identities, is_strange, may_be_strange, moved, usual_name
from agent.reconcile.rows import SEARCH, Rows, adopt
from agent.reconcile.view import Outside, View
from agent.state import Latest
from cni.attachment import Attachments

log = logging.getLogger(__name__)


class Vfs:
    """Looks after the VFs that no row speaks of."""

    name = "VFs without a row"

    def __init__(
        self,
        ledger: Ledger,
        attachments: Attachments,
        outside: Outside,
        rows: Rows,
        snapshot: Latest[Snapshot],
        settled: Latest[bool],
    ) -> None:
        """`settled` says whether the grants have agreed with kubelet's word once since the start."""
        self._ledger = ledger
        self._attachments = attachments
        self._outside = outside
        self._rows = rows
        self._snapshot = snapshot
        self._settled = settled
        self._missing: Sequence[str] = ()

    def heal(self, view: View) -> None:
        """Survey all VFs of the host."""
        snapshot = self._snapshot.value
        if not snapshot.boot_id:
            return  # nothing was scanned yet
        known = self._ledger.known_devices()
        held = {row.device for row in self._ledger.attachments()}
        found = survey(snapshot, held, known, self._attachments.finder.udev)
        if found.strange or found.missing:  # mostly not, and to say which are ours takes long on a large node
            found = found.of(set(self._outside.our_vfs()))
        by_device = {k.device: k for k in known}
        for device in found.strange:
            if self._rows.retries.is_due(device):
                self._put_back(device, by_device.get(device))
        self._look_for(found.missing, view)
        # What the last boot's VFs were is needed until the grants have followed them.
        if self._settled.value or not moved(known, snapshot):
            gone = forgotten(snapshot, known)
            if found.learn or gone:
                self._ledger.know(found.learn, gone)

    def _put_back(self, device: str, known: KnownDevice | None) -> None:
        try:
            if not self._attachments.finder.under_a_strange_name(device, known):
                return
        except (AgentError, OSError) as error:  # and the others are looked at all the same
            log.error("%s has a strange name, and cannot be put back yet: %s", device, error)
            return
        self._outside.count("restore", "strange-name")
        self._rows.heal_one(device)

    def _look_for(self, missing: Sequence[str], view: View) -> None:
        """Search namespaces for VFs; for the same ones less and less often, since it opens each of them."""
        if missing != self._missing:
            self._missing = missing
            self._rows.retries.succeeded(SEARCH)
        if not missing or not self._rows.retries.is_due(SEARCH):
            return
        adopt(
            self._attachments, self._outside
        )  # a replaced plugin that still has its name knows more of them than the search finds out
        units, holds = self._outside.devices_of_units() or {}, self._ledger.holds()
        held_units = [(held, d) for held in view.held_units or () for d in units.get(held.unit_id, (held.unit_id,))]
        pods: dict[str, PodRef] = {device: held.pod for held, device in held_units}
        pods |= {device: hold.pod for hold in holds if hold.pod is not None for device in hold.devices}
        live = [s for s in view.sandboxes or () if s.ready]
        containers = {(s.pod.namespace, s.pod.name): s.sandbox_id for s in live}
        resources = {device: held.resource_name for held, device in held_units}
        for claim in self._ledger.claims():
            if len(claim.pods) == 1:
                pods |= dict.fromkeys(claim.alone, claim.pods[0])
        for _ in self._attachments.finder.in_namespaces(missing, pods, containers, resources):
            self._outside.count("adopt", "found-in-pod")
        self._rows.retries.failed(SEARCH)


@dataclass(frozen=True, slots=True)
class Survey:
    """What is to be done about VFs that no row speaks of."""

    learn: tuple[KnownDevice, ...] = ()
    """As they are now, which is how they should be."""
    strange: tuple[str, ...] = ()
    """In the host under the name that some pod gave them."""
    missing: tuple[str, ...] = ()
    """They should have an interface in the host, and have none: a pod may have them."""

    def of(self, ours: Collection[str]) -> Survey:
        """Leave out what no resource offers: it belongs to somebody else, who moves it with no word to us."""
        strange = tuple(device for device in self.strange if device in ours)
        return Survey(self.learn, strange, tuple(device for device in self.missing if device in ours))


def survey(
    snapshot: Snapshot,
    held: Collection[str],
    known: Iterable[KnownDevice],
    udev: Callable[[int], Mapping[str, str]] = lambda ifindex: {},
) -> Survey:
    """Look at all VFs without a row. `udev` reads udev's database."""
    known_here = {k.device: k for k in known}
    identity = identities(snapshot)
    learn: list[KnownDevice] = []
    strange, missing = [], []
    for device in snapshot.devices:
        if not device.is_vf or device.address in held:
            continue
        before = known_here.get(device.address)
        if before is not None and before.boot_id != snapshot.boot_id:
            before = None  # another device, maybe
        netdev = device.netdev
        if netdev is None:
            if should_have_interface(device, snapshot):
                missing.append(device.address)
            continue
        if may_be_strange(netdev.name):
            usual = usual_name(device, snapshot, before.netdev if before else None, udev(netdev.ifindex))
            if is_strange(netdev.name, usual):
                strange.append(device.address)
                continue
        now = KnownDevice(device.address, identity(device), netdev.name, netdev.mac, netdev.mtu, snapshot.boot_id)
        if now != before:
            learn.append(now)
    return Survey(tuple(learn), tuple(strange), tuple(missing))


def forgotten(snapshot: Snapshot, known: Iterable[KnownDevice]) -> tuple[str, ...]:
    """List the addresses about which nothing need be remembered: of an earlier boot, or with no device."""
    return tuple(k.device for k in known if k.boot_id != snapshot.boot_id or k.device not in snapshot.by_address)


def should_have_interface(device: PciDevice, snapshot: Snapshot) -> bool:
    """Tell whether the driver of a VF gives it an interface. Without a driver, or for vfio, there is none."""
    if device.driver is None or device.is_for_vfio or device.driver.startswith(("uio", "igb_uio")):
        return False
    pf = snapshot.parent(device)
    return pf is not None and pf.netdev is not None


class Ended(StrEnum):
    """By what a device is clean again. Metrics count by it."""

    VERIFIED = "verified"
    REBOOTED = "rebooted"
    DEVICE_GONE = "device-gone"


def end_quarantines(ledger: Ledger, snapshot: Snapshot, outside: Outside) -> None:
    """End the quarantine of devices that are clean again."""
    quarantined = ledger.quarantines()
    # Read in this order: a device that is put in quarantine meanwhile still has its row.
    held = {row.device for row in ledger.attachments()}
    if not snapshot.boot_id:
        return
    for device, reason in quarantines_to_end(quarantined, snapshot, held, ledger.boot_id).items():
        log.info("%s leaves quarantine: %s", device, reason)
        ledger.end_quarantine(device)
        outside.count("quarantine-end", reason)


def quarantines_to_end(
    quarantined: Iterable[Quarantine], snapshot: Snapshot, held: Collection[str], boot_id: str
) -> Mapping[str, Ended]:
    """Tell which devices are clean again, and by what.

    The row of a device in doubt stays until it is verified clean. So one without a row is clean, if it is
    where it should be; a reboot has reset it, and has made its address another device's, maybe; and what
    is off the bus comes back reset.
    """
    ended = {}
    for entry in quarantined:
        if entry.device in held:
            continue
        device = snapshot.by_address.get(entry.device)
        if entry.boot_id not in ("", boot_id):
            ended[entry.device] = Ended.REBOOTED
        elif device is None:
            ended[entry.device] = Ended.DEVICE_GONE if is_pci_address(entry.device) else Ended.VERIFIED
        elif device.netdev is not None or not should_have_interface(device, snapshot):
            ended[entry.device] = Ended.VERIFIED
    return ended
