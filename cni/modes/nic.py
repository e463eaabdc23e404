"""Mode `nic`: a whole adapter, or any interface of the host, into a pod and back.

Named by PCI address, or by the interface's name where there is no PCI device below it. An interface of hardware
comes back with its namespace's end; one of software (veth, dummy …) dies there, unless it left before.
The host's addresses and routes on it end with the move, and are given back as far as the host still takes them: a
gateway may be reached no longer, or a destination by another way. An adapter is not withheld for that, since waiting
does not bring the gateway back; but it is told, with the command that gives it by hand.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace

from agent.errors import DeviceGone, HardwareError, NetlinkFailed, RequestInvalid
from agent.hardware import netns as namespaces
from agent.hardware.host import Host, Link, LinkChange, Route
from agent.model.allocation import Attachment, Undo, VfSettings
from agent.model.device import Snapshot, is_pci_address
from agent.model.vf_identity import name_by_place
from cni.modes import moving, pf, rdma
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.modes.moving import Whereabouts
from cni.netconf import NetConf

LOOPBACK = "lo"
PATIENCE_SECONDS = 2.0
"""How long the host may take until a gateway is reached again: others may be setting up interfaces, too."""
NOT_ITS_FAULT = frozenset((errno.ENODEV, errno.ENOMEM, errno.ENOBUFS, errno.EINTR))
"""These say nothing of the address or the route."""

Place = tuple[str, int | None, int | None]
"""What no two routes share: destination, table and metric."""

log = logging.getLogger(__name__)


def key(host: Host, conf: NetConf, container_id: str, ifname: str) -> str:
    """Name the PCI device, or else the interface. The same device has one key, however it is called."""
    if conf.device is not None:
        return conf.device
    if conf.master is None:
        raise RequestInvalid("mode nic needs deviceID (a PCI address) or master (an interface of the host)")
    link = host.links.find(conf.master)
    if link is None:
        return conf.master  # in a pod, or gone: `plan` says so
    return device_of(link)


def device_of(link: Link) -> str:
    """Name the PCI device of an interface of the host, or else itself."""
    return link.device if link.device is not None and is_pci_address(link.device) else link.name


def plan(host: Host, snapshot: Snapshot, target: Target) -> Planned:
    """Find the interface and record how it is now, with its addresses and routes. Changes nothing.

    Raises DeviceGone for one that is not there, HardwareError for one that the node itself needs.
    """
    device, conf = target.device, target.conf
    if conf.settings != VfSettings(mac=conf.settings.mac):
        raise RequestInvalid("vlan, rates, spoofchk, trust and link_state are what a PF enforces on VFs: use mode vf")
    has_pci = is_pci_address(device)
    link = host.find_netdev(device) if has_pci else host.links.find(device)
    if link is None:
        raise DeviceGone(device, "with an interface in the host; it may be in a pod, or have no network driver")
    _refuse_needed(host, link)
    addresses = host.links.addresses(link.name, None)
    routes = [asdict(route) for route in host.links.routes(None, link.name) if not route.by_itself]
    undo = moving.record(host, link, mode="nic")
    macs = sorted({link.mac, conf.settings.mac or link.mac})
    known = {"ifindex": link.ifindex, "macs": macs, "link_kind": link.kind}
    undo = replace(undo, extra={"addresses": list(addresses), "routes": routes, **known})
    if conf.rdma and not has_pci:
        raise RequestInvalid(f"rdma: {device} is no PCI device, so no RDMA device belongs to it: leave `rdma` out")
    if has_pci:
        undo = rdma.with_device(host, snapshot, device, conf.rdma, undo)
    change = LinkChange(name=target.ifname, mac=conf.settings.mac, mtu=conf.mtu, up=True)
    return Planned(target, undo, link, change)


def _refuse_needed(host: Host, link: Link) -> None:
    if link.name == LOOPBACK:
        raise HardwareError("lo is every namespace's own: it cannot be moved")
    if link.master is not None:
        master = next((other.name for other in host.links.listed() if other.ifindex == link.master), "another")
        raise HardwareError(f"{link.name} is a port of {master}: take it out first, if the node does not need it")
    if above := _uppers(host, link.name):
        raise HardwareError(
            f"{link.name} carries {', '.join(above)}: remove them first, if the node does not need them"
        )
    for what, why in host.lifelines().items():
        if what == link.name:
            raise HardwareError(f"{link.name} {why}: without it this node would be cut off; choose another interface")


def _uppers(host: Host, name: str) -> Sequence[str]:
    """Interfaces made upon this one: VLANs, macvlans …"""
    try:
        entries = os.listdir(host.root / "sys/class/net" / name)
    except OSError:
        return ()
    return sorted(entry.removeprefix("upper_") for entry in entries if entry.startswith("upper_"))


def enter(host: Host, planned: Planned, netns: int) -> InterfaceFacts:
    """Move the interface into the namespace."""
    undo, link, change = planned.undo, planned.link, planned.change
    assert link is not None
    where = _where(host, planned.target.device, planned.target.ifname, undo)
    moving.move_in(host, planned, link, where, netns)
    rdma.enter(host, planned.target.device, undo, netns, any_node=planned.any_node)
    return moving.facts(planned, change.mac or undo.mac, change.mtu or undo.mtu)


def leave(host: Host, attachment: Attachment, netns: int | None) -> Sequence[str]:
    """Bring the interface back to the host as it was found, with addresses and routes, and verify it."""
    if is_pci_address(attachment.device) and not pf.exists(host, attachment.device):
        return ()
    try:
        rdma.leave(host, attachment.device, attachment, netns)
    finally:
        lost = _leave(host, attachment, netns)
    return lost


def _leave(host: Host, attachment: Attachment, netns: int | None) -> Sequence[str]:
    device, undo = attachment.device, attachment.undo
    has_pci = is_pci_address(device)
    where = _where(host, device, attachment.ifname, undo)
    # Looked for in the host first: in the pod another may have its name, and its index by chance.
    link = where.home() or moving.bring_back(host, where, undo, netns)
    if link is None and has_pci and pf.can_have_interface(host, device):
        link = moving.await_return(where)
    if link is None:
        log.warning("%s has no interface any more: it ended with the pod, or was unbound", device)
        return ()
    moving.settle(host, where, undo, link, pod_may_hold=moving.may_hold(attachment, netns))
    routes = tuple(Route(**route) for route in undo.extra.get("routes", ()))
    name = (where.home() or link).name
    return _give_back(host, name, tuple(undo.extra.get("addresses", ())), routes)


def _where(host: Host, device: str, ifname: str, undo: Undo) -> Whereabouts:
    if is_pci_address(device):
        return moving.by_address(host, device, ifname)
    names = {undo.netdev, ifname, name_by_place(device)}

    def home() -> Link | None:
        return _known(host, None, undo, names)

    def there(netns: int) -> Link | None:
        return _known(host, netns, undo, names)

    return Whereabouts(device, home, there)


def _known(host: Host, netns: int | None, undo: Undo, names: Collection[str]) -> Link | None:
    """Find an interface that has no PCI device to know it by.

    The pod may have renamed it, or changed its MAC, and in another namespace it may have another index; another
    interface may have taken its name, and share its MAC. So two of the three must fit. What shares MACs for good (a
    VLAN and what it is upon, a bond and its ports) is of another kind, or a port.
    """
    index, kind = undo.extra["ifindex"], undo.extra.get("link_kind")  # which earlier versions did not note

    def alike(link: Link) -> int:
        if (
            link.name == LOOPBACK
            or kind not in (None, link.kind)
            or (link.master is not None and link.ifindex != index)
        ):
            return 0
        return sum((link.name in names, link.mac in undo.extra["macs"], link.ifindex == index))

    def fits(link: Link) -> bool:
        return alike(link) >= 2

    return max(host.links.listed(netns, fits), key=alike, default=None)


def away(host: Host, attachment: Attachment) -> bool:
    """Tell whether the interface is not back: only a namespace that lives can keep it, if it is of hardware.

    One of software ends with its namespace, so what can be seen of that tells.
    """
    device, undo = attachment.device, attachment.undo
    if not is_pci_address(device):
        is_back = _where(host, device, attachment.ifname, undo).home() is not None
        return not is_back and namespaces.is_hidden(attachment.owner.netns, attachment.netns_path)
    return pf.is_away(host, device)


def differences(host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
    """Tell what about an attached interface is not as it was set up. Empty: all is well."""
    link = _where(host, attachment.device, attachment.ifname, attachment.undo).there(netns)
    found = moving.link_differences(link, attachment, moving.expected_mac(attachment, conf))
    return found + rdma.differences(host, attachment, netns)


def _give_back(host: Host, name: str, addresses: Sequence[str], routes: Sequence[Route]) -> tuple[str, ...]:
    """Give an interface its addresses and routes. Return what the host does not take, as commands with the reason.

    Raises HardwareError if the interface itself is in the way.
    """
    whys = {address: _refusal(host, name, (address,), ()) for address in addresses}
    lost = [f"ip address add {address} dev {name}: {why}" for address, why in whys.items() if why]
    others = Counter(host.links.routes(None)) - Counter(host.links.routes(None, name)) if routes else ()
    occupied = {_place(route) for route in others}
    refused = {route: "" for route in routes if _place(route) not in occupied}

    def are_given() -> bool | None:
        """Try those that are left: one may lead to the gateway of another."""
        for route in tuple(refused):
            refused[route] = _refusal(host, name, (), (route,))
            if not refused[route]:
                del refused[route]
        return not refused or None

    moving.awaited(are_given, PATIENCE_SECONDS)
    refused |= {r: "its destination is reached by another way now" for r in routes if _place(r) in occupied}
    return (*lost, *(f"{_command(name, route)}: {why}" for route, why in refused.items()))


def _refusal(host: Host, name: str, addresses: tuple[str, ...], routes: tuple[Route, ...]) -> str:
    """Give one of these to an interface; return why the host does not take it."""
    try:
        host.links.configure(name, None, addresses, routes)
    except NetlinkFailed as error:
        if error.errno in NOT_ITS_FAULT:
            raise
        return str(error).removeprefix(f"{error.action}: ")
    return ""


def _command(name: str, route: Route) -> str:
    """Spell the command that makes a route."""
    told = (
        ("via", route.gateway),
        ("dev", name),
        ("metric", route.priority),
        ("table", route.table),
        ("src", route.source),
        ("proto", route.protocol),
    )
    words = " ".join(f"{word} {value}" for word, value in told if value is not None)
    return f"ip route add {route.destination} {words}" + (" onlink" if route.onlink else "")


def _place(route: Route) -> Place:
    return route.destination, route.table, route.priority
