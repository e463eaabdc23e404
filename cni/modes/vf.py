"""Mode `vf`: one Ethernet VF into a pod and back.

Entering: settings on the PF, then the interface. Leaving works from any point in between, and may
be repeated: it looks at where the device is and brings it to what the undo record says. So the same
code serves DEL, a failed ADD, and the reconciler after a crash.
"""

from __future__ import annotations

import errno
import logging
import re
import time
from dataclasses import fields, replace

from agent.errors import DeviceGone, HardwareError, NetlinkFailed, RequestInvalid
from agent.hardware.host import Host, Link, LinkChange
from agent.model.allocation import Attachment, Undo, VfSettings
from agent.model.device import Snapshot
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.netconf import NetConf

RETURN_SECONDS = 2.0
"""How long the kernel may take to bring back an interface from a namespace that went away."""

log = logging.getLogger(__name__)


def key(host: Host, conf: NetConf, container_id: str, ifname: str) -> str:
    """Name a VF by its PCI address."""
    if conf.device is None:
        raise RequestInvalid("deviceID is missing: name a VF by its PCI address")
    return conf.device


def plan(host: Host, snapshot: Snapshot, target: Target) -> Planned:
    """Find the device and record how it is now. Changes nothing.

    Raises DeviceGone for a device that vanished, HardwareError for one that is no VF or has no interface.
    """
    device, settings = target.device, target.conf.settings
    facts = snapshot.by_address.get(device)
    if facts is None:
        raise DeviceGone(device, "among the node's PCI devices; its PF's sriov_numvfs may have been changed")
    if facts.physfn is None:
        raise HardwareError(f"{device} is not a VF, and mode vf takes nothing else: the node may need it itself")
    link = host.find_netdev(device)
    if link is None:
        raise HardwareError(
            f"{device} has no interface in the host (driver {facts.driver or 'none'}):"
            " it needs a network driver, or sits in another namespace"
        )
    change = LinkChange(name=target.ifname, mac=settings.mac, mtu=target.conf.mtu, up=True)
    undo = Undo(netdev=link.name, mac=link.mac, mtu=link.mtu, up=link.up)
    if settings.is_empty:
        return Planned(device, target.ifname, undo, device, link, change)
    pf = snapshot.pf_netdev(facts)
    if facts.vf_index is None or pf is None:
        raise HardwareError(f"the PF of {device}, {facts.physfn}, has no interface: VLAN, MAC, rates cannot be set")
    before = host.vf_control.read(pf.name, facts.vf_index)
    undo = replace(undo, pf_netdev=pf.name, vf_index=facts.vf_index, settings=_only(before, settings))
    return Planned(device, target.ifname, undo, device, link, change, settings)


def enter(host: Host, planned: Planned, netns: int) -> InterfaceFacts:
    """Set the VF up on its PF and move its interface into the namespace."""
    undo, link = planned.undo, planned.link
    assert link is not None
    if not planned.settings.is_empty and undo.pf_netdev is not None and undo.vf_index is not None:
        host.vf_control.apply(undo.pf_netdev, undo.vf_index, planned.settings)
    try:
        host.links.move_in(link, netns, planned.change)
    except NetlinkFailed as error:
        if error.errno == errno.EEXIST:
            raise NetlinkFailed(error.action, error.errno, "an interface of that name is in the pod already") from error
        if error.errno != errno.EADDRNOTAVAIL or planned.change.mac is None:
            raise
        # The kernel moves before it sets the MAC and renames after it: the interface is in the pod, of whatever name.
        moved = host.links.find_device(planned.device, netns)
        if moved is None:
            raise
        _fetch_mac(host, moved, planned.change, netns)
    mac, mtu = planned.change.mac or undo.mac, planned.change.mtu or undo.mtu
    return InterfaceFacts(planned.ifname, mac, mtu, planned.pci_id)


def leave(host: Host, snapshot: Snapshot, attachment: Attachment, netns: int | None) -> None:
    """Bring a VF back to the host as it was found, from wherever it is, and verify it.

    A device that no longer exists is success. `netns` is the pod's namespace if it is still open.
    Raises HardwareError if the device is not (verifiably) back.
    """
    undo = attachment.undo
    if not exists(host, attachment.device):
        return
    if netns is not None:
        try:
            _bring_out(host, attachment, netns)  # it is there, nearly always
        except HardwareError:
            if host.find_netdev(attachment.device) is None:
                raise
    link = host.find_netdev(attachment.device)
    if link is None:
        link = _await_return(host, attachment.device)
    if undo.pf_netdev is not None and undo.vf_index is not None and not undo.settings.is_empty:
        facts = snapshot.by_address.get(attachment.device)
        pf = snapshot.pf_netdev(facts) if facts is not None else None
        host.vf_control.apply(pf.name if pf else undo.pf_netdev, undo.vf_index, undo.settings)
        link = host.find_netdev(attachment.device) or link
    # The driver may refuse the VF a MAC while the PF enforces another, hence after the PF's settings.
    name = undo.netdev
    if link.name != name and host.links.find(name) is not None:
        name = spare_name(attachment.device)
        log.warning("%s keeps the name %s: another interface is called %s now", attachment.device, name, undo.netdev)
    change = LinkChange(
        name=name if link.name != name else None,
        mac=undo.mac if link.mac != undo.mac else None,
        mtu=undo.mtu if link.mtu != undo.mtu else None,
        up=undo.up if link.up != undo.up else None,
    )
    if change != LinkChange():
        try:
            host.links.change(link, change)
        except NetlinkFailed as error:
            if error.errno != errno.EADDRNOTAVAIL or change.mac is None:
                raise
            _fetch_mac(host, link, replace(change, up=undo.up), None)
        link = host.find_netdev(attachment.device) or link
    _verify(attachment.device, link, replace(undo, netdev=name))


def _fetch_mac(host: Host, link: Link, change: LinkChange, netns: int | None) -> None:
    """Make a change, with the MAC fetched from the PF by a driver that will not be told it.

    Once the PF has set a VF's MAC, igbvf answers EADDRNOTAVAIL even to that same MAC; it asks the PF
    when its interface goes down (drivers/net/ethernet/intel/igbvf: netdev.c, igbvf_down; vf.c,
    e1000_rar_set_vf). Raises HardwareError if the interface then has another MAC.
    """
    for up in (True, False):
        host.links.change(link, LinkChange(up=up), netns)
    host.links.change(link, replace(change, mac=None), netns)
    found = host.links.find(change.name or link.name, netns)
    if found is None or found.mac != change.mac:
        raise HardwareError(f"{link.name} takes no MAC {change.mac}: its PF gives it {found.mac if found else 'none'}")


def away(host: Host, attachment: Attachment) -> bool:
    """Tell whether the VF is not back: only a namespace that lives can keep it."""
    return exists(host, attachment.device) and host.find_netdev(attachment.device) is None


def differences(host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
    """Tell what about an attached VF is not as it was set up. Empty: all is well."""
    settings, mtu = VfSettings(**attachment.request["settings"]), attachment.request["mtu"]
    link = host.links.find(attachment.ifname, netns)
    if link is None:
        return [f"interface {attachment.ifname} is not in the pod"]
    found = []
    if not link.up:
        found.append(f"{attachment.ifname} is down")
    if mtu is not None and link.mtu != mtu:
        found.append(f"{attachment.ifname} has MTU {link.mtu}, not {mtu}")
    if settings.mac is not None and link.mac != settings.mac:
        found.append(f"{attachment.ifname} has MAC {link.mac}, not {settings.mac}")
    undo = attachment.undo
    if undo.pf_netdev is not None and undo.vf_index is not None:
        now = host.vf_control.read(undo.pf_netdev, undo.vf_index)
        for field in fields(VfSettings):
            wanted, is_now = getattr(settings, field.name), getattr(now, field.name)
            if wanted is not None and is_now is not None and wanted != is_now:
                found.append(f"the PF {undo.pf_netdev} has {field.name} {is_now!r}, not {wanted!r}")
    return found


def _only(before: VfSettings, touched: VfSettings) -> VfSettings:
    """Keep of a reading what is about to be changed: nothing else is put back later."""
    keep = {f.name for f in fields(VfSettings) if getattr(touched, f.name) is not None}
    if keep & {"vlan", "vlan_qos", "vlan_proto"}:
        keep |= {"vlan", "vlan_qos", "vlan_proto"}  # the kernel sets the three together
    if keep & {"min_tx_rate", "max_tx_rate"}:
        keep |= {"min_tx_rate", "max_tx_rate"}
    return VfSettings(**{name: getattr(before, name) for name in keep})


def exists(host: Host, device: str) -> bool:
    """Tell whether the PCI device is there at this moment; a snapshot may have missed it."""
    return (host.root / "sys/bus/pci/devices" / device).exists()


def _bring_out(host: Host, attachment: Attachment, netns: int) -> None:
    link = host.links.find(attachment.ifname, netns)
    if link is None or link.device != attachment.device:
        link = host.links.find_device(attachment.device, netns)  # renamed in the pod, or not moved in full
    if link is None:
        return
    undo = attachment.undo
    change = LinkChange(name=undo.netdev, mtu=undo.mtu if link.mtu != undo.mtu else None, up=False)
    if undo.settings.is_empty and link.mac != undo.mac:
        change = replace(change, mac=undo.mac)
    try:
        host.links.move_out(link, netns, change)
    except NetlinkFailed as error:
        if error.errno != errno.EEXIST:
            raise
        if host.find_netdev(attachment.device) is None:  # it was moved, and only the rename refused, otherwise
            host.links.move_out(link, netns, replace(change, name=spare_name(attachment.device)))


def spare_name(device: str) -> str:
    """Name an interface after its PCI address, for when another took its own name meanwhile.

    With `net.ifnames=0` the kernel gives the lowest free ethN to whoever comes next.
    """
    return "vf" + re.sub("[:.]", "", device)[-12:]


def _await_return(host: Host, device: str) -> Link:
    deadline = time.monotonic() + RETURN_SECONDS
    while time.monotonic() < deadline:
        link = host.find_netdev(device)
        if link is not None:
            return link
        time.sleep(0.02)
    raise HardwareError(
        f"{device} has no interface in the host after {RETURN_SECONDS:g} s: it is in a namespace"
        " that still lives, or its driver is gone"
    )


def _verify(device: str, link: Link, undo: Undo) -> None:
    for what, wanted, found in (
        ("name", undo.netdev, link.name),
        ("MTU", undo.mtu, link.mtu),
        ("MAC", undo.mac, link.mac),
    ):
        if wanted != found:
            raise HardwareError(f"{device} came back with {what} {found}, not {wanted}")
