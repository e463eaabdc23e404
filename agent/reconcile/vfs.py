"""Which VFs of the host are to be remembered, put back under their own names, or looked for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from agent.model.allocation import Quarantine
from agent.model.device import PciDevice, Snapshot, is_pci_address
from agent.model.known import KnownDevice, identities
from agent.model.names import is_strange, may_be_strange, usual_name


@dataclass(frozen=True, slots=True)
class Findings:
    """What is to be done about VFs that no row speaks of."""

    learn: tuple[KnownDevice, ...] = ()
    """As they are now, which is how they should be."""
    strange: tuple[str, ...] = ()
    """In the host under the name that some pod gave them."""
    missing: tuple[str, ...] = ()
    """They should have an interface in the host, and have none: a pod may have them."""

    def of(self, ours: Collection[str]) -> Findings:
        """Leave out what no resource offers: it belongs to somebody else, who moves it with no word to us."""
        strange = tuple(device for device in self.strange if device in ours)
        return Findings(self.learn, strange, tuple(device for device in self.missing if device in ours))


def survey(
    snapshot: Snapshot,
    held: Collection[str],
    known: Iterable[KnownDevice],
    udev: Callable[[int], Mapping[str, str]] = lambda ifindex: {},
) -> Findings:
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
            if _should_have_interface(device, snapshot):
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
    return Findings(tuple(learn), tuple(strange), tuple(missing))


def forgotten(snapshot: Snapshot, known: Iterable[KnownDevice]) -> tuple[str, ...]:
    """List the addresses about which nothing need be remembered: of an earlier boot, or with no device."""
    return tuple(k.device for k in known if k.boot_id != snapshot.boot_id or k.device not in snapshot.by_address)


def quarantines_to_end(
    withheld: Iterable[Quarantine], snapshot: Snapshot, held: Collection[str], boot_id: str
) -> Mapping[str, str]:
    """Tell which devices are clean again, and by what: device → reason.

    The row of a device in doubt stays until it is verified clean. So one without a row is clean, if it is
    where it should be; a reboot has reset it, and has made its address another device's, maybe; and what
    is off the bus comes back reset.
    """
    ended = {}
    for entry in withheld:
        if entry.device in held:
            continue
        device = snapshot.by_address.get(entry.device)
        if entry.boot_id not in ("", boot_id):
            ended[entry.device] = "rebooted"
        elif device is None:
            ended[entry.device] = "device-gone" if is_pci_address(entry.device) else "verified"
        elif device.netdev is not None or not _should_have_interface(device, snapshot):
            ended[entry.device] = "verified"
    return ended


def _should_have_interface(device: PciDevice, snapshot: Snapshot) -> bool:
    """Tell whether the driver of a VF gives it an interface. Without a driver, or for vfio, there is none."""
    if device.driver is None or device.is_for_vfio or device.driver.startswith(("uio", "igb_uio")):
        return False
    pf = snapshot.parent(device)
    return pf is not None and pf.netdev is not None
