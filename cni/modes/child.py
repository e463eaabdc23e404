"""What macvlan and ipoib have in common: an interface made for the pod upon one of the host, and removed again.

The parent stays in the host and serves many pods. The row in the ledger is keyed by parent, container and
interface. A child ends with its namespace, so what there is to undo is in a namespace that lives, or nowhere.
"""

from __future__ import annotations

import errno
import hashlib
from dataclasses import replace

from agent.errors import DeviceGone, HardwareError, NetlinkFailed, RequestInvalid
from agent.hardware import netns as namespaces
from agent.hardware.host import Child, Host, Link
from agent.model.allocation import Attachment, Undo, VfSettings
from cni.modes import moving
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.netconf import NetConf


def key(host: Host, conf: NetConf, container_id: str, ifname: str) -> str:
    """Name the parent, the container and the interface. Raises RequestInvalid if no parent is named."""
    parent = conf.master or conf.device
    if parent is None:
        raise RequestInvalid(f"mode {conf.mode} needs master (an interface of the host) or deviceID (its PCI address)")
    return f"{parent}/{container_id}/{ifname}"


def parent_of(host: Host, conf: NetConf) -> Link:
    """Find the interface to build upon: `master`, or that of the device that was granted.

    Raises DeviceGone, and HardwareError for one that is down: its children would carry nothing.
    """
    found = host.links.find(conf.master) if conf.master is not None else host.find_netdev(conf.device or "")
    if found is None:
        name = conf.master or conf.device or ""
        raise DeviceGone(name, f"with an interface in the host, which mode {conf.mode} builds upon")
    if not found.up:
        raise HardwareError(f"{found.name} is down, and nothing upon it could talk: ip link set {found.name} up")
    if conf.mtu is not None and conf.mtu > found.mtu:
        raise RequestInvalid(f"mtu {conf.mtu} is above that of {found.name}, {found.mtu}: take at most that")
    return found


def refuse_settings(conf: NetConf) -> None:
    """Raise RequestInvalid for what only the PF of a VF can enforce."""
    if conf.settings != VfSettings(mac=conf.settings.mac):
        raise RequestInvalid(f"vlan, rates, spoofchk, trust and link_state need a VF: mode {conf.mode} has none")


def planned(target: Target, parent: Link, child: Child, mac: str) -> Planned:
    """Say what is to be made, and what the row must hold to find it again. `mac` is empty if the kernel chooses it."""
    extra = {"parent_mac": parent.mac, "kind": child.kind}
    undo = Undo(netdev=parent.name, mac=mac, mtu=child.mtu or parent.mtu, up=True, mode=target.mode)
    return Planned(target.device, target.ifname, replace(undo, extra=extra), None, parent, facts=(child, target))


def enter(host: Host, plan: Planned, netns: int) -> InterfaceFacts:
    """Make the child in the namespace, complete, and see what it is like."""
    child, target = plan.facts
    parent = plan.link
    assert parent is not None
    try:
        host.links.create(child, parent, netns)
    except NetlinkFailed as error:
        raise NetlinkFailed(error.action, error.errno, _why(child, parent, error)) from error
    found = host.links.find(child.name, netns)
    if found is None:
        raise HardwareError(f"{child.kind} interface {child.name} was made in the pod but is not there")
    if target.conf.altnames:
        host.links.change_altnames(found, add=target.conf.altnames, netns=netns)
    return InterfaceFacts(found.name, found.mac, found.mtu, None)


def leave(host: Host, attachment: Attachment, netns: int | None) -> None:
    """Remove the child, wherever it is, and verify that. Without a namespace it ended with it."""
    if netns is None:
        return
    found = find(host, attachment, netns)
    if found is None:
        return
    host.links.remove(found, netns)
    if find(host, attachment, netns) is not None:
        raise HardwareError(f"{found.name} of {attachment.device} was removed without an error but is still there")


def find(host: Host, attachment: Attachment, netns: int) -> Link | None:
    """Find the child in the pod: under its name, or renamed, by the MAC that the row tells."""
    undo = attachment.undo
    kind = undo.extra.get("kind")
    found = host.links.find(attachment.ifname, netns)
    if found is not None and found.kind == kind and undo.mac in ("", found.mac):
        return found
    if not undo.mac:
        return None
    return next(iter(host.links.listed(netns, lambda link: (link.kind, link.mac) == (kind, undo.mac))), None)


def away(attachment: Attachment) -> bool:
    """Tell whether the namespace, with which the child ends, cannot be judged from here: its pod may live."""
    return namespaces.is_hidden(attachment.owner.netns, attachment.netns_path)


def differences(host: Host, attachment: Attachment, netns: int) -> list[str]:
    """Tell what about the child is not as it was made."""
    undo, request = attachment.undo, attachment.request
    link = find(host, attachment, netns)
    mac = undo.mac or (link.mac if link is not None else "")
    mtu = request["mtu"] or undo.mtu
    found = moving.link_differences(link, attachment.ifname, mac, mtu, tuple(request.get("altnames", ())))
    parent = host.links.find(undo.netdev)
    if parent is None or parent.mac != undo.extra.get("parent_mac", parent.mac):
        found.append(f"its parent {undo.netdev} is not in the host any more")
    elif not parent.up:
        found.append(f"its parent {undo.netdev} is down")
    return found


def mac_for(target: Target) -> str:
    """Choose a MAC that is the container's own and the same at each try; locally administered, unicast."""
    digest = hashlib.blake2b(f"{target.container_id}/{target.ifname}/{target.device}".encode(), digest_size=5)
    return "02:" + digest.digest().hex(":")


def _why(child: Child, parent: Link, error: NetlinkFailed) -> str:
    if error.errno == errno.EEXIST:
        return f"an interface called {child.name} is in the pod already"
    if error.errno == errno.EOPNOTSUPP:
        return f"the kernel has no {child.kind} interfaces: load the module {_MODULES.get(child.kind, child.kind)}"
    if error.errno == errno.EBUSY:
        return f"{parent.name} is in use otherwise, as a bridge's port or by a passthru macvlan"
    if error.errno == errno.EINVAL:
        return f"{parent.name} cannot carry it (is it an interface of the right kind?)"
    return str(error).removeprefix(f"{error.action}: ")


_MODULES = {"ipoib": "ib_ipoib"}
