"""Modes `macvlan`, `ipvlan`, `ipoib` and `bond`: an interface made for the pod, and removed again.

It is made upon one of the host, its parent, or as a bond over VFs that are in the pod. The parent stays in the host and
serves many pods. One that is a port of a bond stands for the bond, which carries what its ports can (as an HCA with
RoCE LAG, whose RDMA device is one over both its ports). The row in the ledger is keyed by parent, container and
interface. A child ends with its namespace, so what there is to undo is in a namespace that lives,
or nowhere.
"""

from __future__ import annotations

import errno
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agent.errors import DeviceGone, HardwareError, NetlinkFailed, RequestInvalid
from agent.hardware import netns as namespaces
from agent.hardware.host import Child, Host, Link, LinkChange
from agent.hardware.netlink.rtnetlink import IPOIB_MODES
from agent.model.allocation import Attachment, Undo
from agent.model.device import Snapshot
from cni.modes import moving
from cni.modes.infiniband import in_partition, port_of, require_partition, sysfs_number, sysfs_text
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.netconf import NetConf

PASSTHRU = "passthru"
ARPHRD_INFINIBAND = "32"
BONDS = ("bond", "team")

log = logging.getLogger(__name__)


class ChildMode:
    """What they have in common; each adds what it makes, and how if not in one request."""

    def key(self, host: Host, conf: NetConf, container_id: str, ifname: str) -> str:
        """Name the parent, the container and the interface. Raises RequestInvalid if no parent is named."""
        parent = conf.master or conf.device
        if parent is None:
            raise RequestInvalid(
                f"mode {conf.mode} needs master (an interface of the host) or deviceID (its PCI address)"
            )
        return f"{parent}/{container_id}/{ifname}"

    def plan(self, host: Host, snapshot: Snapshot, target: Target) -> Planned:
        """Find the parent, say what is to be made, and what the row must hold to find it again. Changes nothing."""
        parent = _parent_of(host, target.conf)
        child, mac, extra = self.made(host, target, parent)
        extra |= {"parent_mac": parent.mac, "kind": child.kind}
        undo = Undo(parent.name, mac, child.mtu or parent.mtu, up=True, mode=target.mode, extra=extra)
        return Planned(target, undo, parent, child=child)

    def made(self, host: Host, target: Target, parent: Link) -> tuple[Child, str, dict[str, Any]]:
        """Return the interface to make, the MAC to find it by (empty for none), and what else the row must hold."""
        raise NotImplementedError

    def enter(self, host: Host, planned: Planned, netns: int) -> InterfaceFacts:
        """Make the child in the namespace, complete, and see what it is like."""
        child, altnames = planned.child, planned.target.conf.altnames
        assert child is not None
        self.make(host, planned, child, netns)
        found = _found(host, child.name, netns)
        if altnames:
            host.links.change_altnames(found, add=altnames, netns=netns)
        return moving.facts(planned, found.mac, found.mtu)

    def make(self, host: Host, planned: Planned, child: Child, netns: int) -> None:
        """Make the child in the namespace. Raises HardwareError."""
        _create(host, child, planned.link, netns)

    def leave(self, host: Host, attachment: Attachment, netns: int | None) -> Sequence[str]:
        """Remove the child, wherever it is, and verify that. Without a namespace it ended with it."""
        found = find_child(host, attachment, netns) if netns is not None else None
        if found is not None:
            host.links.remove(found, netns)
            if netns is not None and find_child(host, attachment, netns) is not None:
                raise HardwareError(
                    f"{found.name} of {attachment.device} was removed without an error but is still there"
                )
        return ()

    def away(self, host: Host, attachment: Attachment) -> bool:
        """Tell whether the namespace, with which the child ends, cannot be judged from here: its pod may live."""
        return namespaces.is_hidden(attachment.owner.netns, attachment.netns_path)

    def differences(self, host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
        """Tell what about the child is not as it was made."""
        undo = attachment.undo
        found = moving.link_differences(find_child(host, attachment, netns), attachment, undo.mac)
        parent = host.links.find(undo.netdev)
        if parent is None or not _is_the_same(parent, undo):
            found.append(f"its parent {undo.netdev} is not in the host any more")
        elif not parent.up:
            found.append(f"its parent {undo.netdev} is down")
        return found


class Macvlan(ChildMode):
    """An interface of the pod's own upon the netdev of a shared HCA.

    RDMA-CM in the pod binds to an address of the pod, and the HCA's port has a GID for each address of an interface
    upon its netdev; so pods that share an HCA need no more than this to be told apart. Made in the pod's namespace in
    one request: no name in the host, no half-made interface after a crash but in the pod.
    """

    def made(self, host: Host, target: Target, parent: Link) -> tuple[Child, str, dict[str, Any]]:
        """Choose the MAC, by which the interface is found again."""
        conf = target.conf
        wanted: str | None = conf.settings.mac or _mac_for(target)
        if conf.macvlan_mode == PASSTHRU:  # shares its parent's; another would be set on the parent too
            if conf.settings.mac is not None:
                raise RequestInvalid(
                    f"mac cannot be had in macvlanMode passthru: it would become that of {parent.name}"
                )
            wanted = None
        made = Child("macvlan", target.ifname, conf.macvlan_mode, mac=wanted, mtu=conf.mtu or parent.mtu)
        return made, wanted or parent.mac, {}


class Ipvlan(ChildMode):
    """An interface of the pod's own with the MAC of the netdev that it is upon.

    For networks that let one MAC in at each port, as clouds and some switches do: the pods of a node are told apart by
    their addresses alone. What is said of macvlans and RDMA-CM goes for it, too.
    """

    def made(self, host: Host, target: Target, parent: Link) -> tuple[Child, str, dict[str, Any]]:
        """Its MAC tells nothing: that of all others upon the parent, and another when a bond's port is another."""
        conf = target.conf
        made = Child("ipvlan", target.ifname, conf.ipvlan_mode, mtu=conf.mtu or parent.mtu)
        return made, "", {"ipvlan_mode": made.mode}


class Ipoib(ChildMode):
    """An IP-over-InfiniBand child of the pod's own upon an IPoIB interface of the host, in any partition.

    Made in the pod's namespace at once. Should a kernel refuse that, it is made in the host under a name of its own and
    moved, as has long been done; the name follows from the row, so that a crash in between leaves nothing behind.
    """

    def made(self, host: Host, target: Target, parent: Link) -> tuple[Child, str, dict[str, Any]]:
        """Find the partition in the port's table.

        Raises HardwareError for a parent that is not IPoIB, and for a partition that its port is not a member of.
        """
        conf = target.conf
        if conf.settings.mac is not None:
            raise RequestInvalid(
                "mac cannot be had in mode ipoib: the address is made of the port's GID and a queue pair"
            )
        folder = host.root / "sys/class/net" / parent.name
        if sysfs_text(folder / "type") != ARPHRD_INFINIBAND:
            raise HardwareError(
                f"{parent.name} is no IPoIB interface: name one as master (ib0, say), or take mode macvlan"
            )
        mode, pkey = sysfs_text(folder / "mode"), conf.pkey
        if pkey is not None:
            require_partition(folder / "device", port_of(folder), pkey)
        else:
            pkey = sysfs_number(sysfs_text(folder / "pkey"))
        mode = mode if mode in IPOIB_MODES else "datagram"
        return Child("ipoib", target.ifname, mode, mtu=conf.mtu, pkey=pkey), "", {"pkey": pkey}

    def make(self, host: Host, planned: Planned, child: Child, netns: int) -> None:
        """Make it in the namespace, or make it in the host and move it there."""
        try:
            super().make(host, planned, child, netns)
        except NetlinkFailed as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            log.info("no IPoIB child can be made in another namespace: %s", error)
            name = temporary_name(planned.target.device)
            try:
                host.links.create(replace(child, name=name, up=False), planned.link, None)
            except NetlinkFailed:
                raise error from None  # refused for another reason, and that error says which
            host.links.move_in(_found(host, name, None), netns, LinkChange(name=child.name, up=True))

    def leave(self, host: Host, attachment: Attachment, netns: int | None) -> Sequence[str]:
        """Remove it from the pod, or from the host if it did not get further, and verify that."""
        super().leave(host, attachment, netns)
        left = host.links.find(temporary_name(attachment.device))
        if left is not None and left.kind == "ipoib":
            host.links.remove(left)
        return ()

    def differences(self, host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
        """Tell what about it is not as it was made."""
        found = super().differences(host, attachment, netns, conf)
        pkey, folder = attachment.undo.extra.get("pkey"), host.root / "sys/class/net" / attachment.undo.netdev
        if pkey is not None and not in_partition(folder / "device", port_of(folder), pkey):
            found.append(f"{attachment.undo.netdev} is not in partition {pkey:#06x} any more")
        return found


def temporary_name(device: str) -> str:
    """Name the interface in the host, from the row's key: no other has that name."""
    return "nf" + hashlib.blake2b(device.encode(), digest_size=6).hexdigest()


def _parent_of(host: Host, conf: NetConf) -> Link:
    """Find the interface to build upon: `master`, or that of the device that was granted; a bond for a port of it.

    Raises DeviceGone, and HardwareError for one that is down: its children would carry nothing.
    """
    found = host.links.find(conf.master) if conf.master is not None else host.find_netdev(conf.device or "")
    if found is None:
        name = conf.master or conf.device or ""
        raise DeviceGone(name, f"with an interface in the host, which mode {conf.mode} builds upon")
    if found.master is not None and conf.mode != "ipoib":  # a port takes no child, but one of InfiniBand does
        found = bond_above(host, found)
    if not found.up:
        raise HardwareError(f"{found.name} is down, and nothing upon it could talk: ip link set {found.name} up")
    if conf.mtu is not None and conf.mtu > found.mtu:
        raise RequestInvalid(f"mtu {conf.mtu} is above that of {found.name}, {found.mtu}: take at most that")
    return found


def bond_above(host: Host, port: Link) -> Link:
    """Find the bond that an interface is a port of; the interface itself where it is a port of something else."""

    def is_it(link: Link) -> bool:
        return link.ifindex == port.master and link.kind in BONDS

    return next(iter(host.links.listed(None, is_it)), port)


def _is_the_same(parent: Link, undo: Undo) -> bool:
    """Tell whether an interface is the one that a child was made upon. A bond's MAC may follow its ports'."""
    return parent.kind in BONDS or parent.mac == undo.extra.get("parent_mac", parent.mac)


def find_child(host: Host, attachment: Attachment, netns: int) -> Link | None:
    """Find the child in the pod: under its name, or renamed, by the MAC that the row tells."""
    undo = attachment.undo
    kind = undo.extra.get("kind")
    found = host.links.find(attachment.ifname, netns)
    if found is not None and found.kind == kind and undo.mac in ("", found.mac):
        return found
    if not undo.mac:
        return None

    def is_it(link: Link) -> bool:
        return (link.kind, link.mac) == (kind, undo.mac)

    return next(iter(host.links.listed(netns, is_it)), None)


def _mac_for(target: Target) -> str:
    """Choose a MAC that is the container's own and the same at each try; locally administered, unicast."""
    digest = hashlib.blake2b(f"{target.container_id}/{target.ifname}/{target.device}".encode(), digest_size=5)
    return "02:" + digest.digest().hex(":")


def _create(host: Host, child: Child, parent: Link | None, netns: int) -> None:
    try:
        host.links.create(child, parent, netns)
    except NetlinkFailed as error:
        raise NetlinkFailed(error.action, error.errno, _why(child, parent, error)) from error


def _found(host: Host, name: str, netns: int | None) -> Link:
    found = host.links.find(name, netns)
    if found is None:
        raise HardwareError(f"{name} was made in {'the host' if netns is None else 'the pod'} but is not there")
    return found


def _why(child: Child, parent: Link | None, error: NetlinkFailed) -> str:
    if error.errno == errno.EEXIST:
        return f"an interface called {child.name} is in the pod already"
    if error.errno == errno.EOPNOTSUPP:
        return f"the kernel has no {child.kind} interfaces: load the module {_MODULES.get(child.kind, child.kind)}"
    if parent is not None and error.errno == errno.EBUSY:
        others = "macvlans" if child.kind == "ipvlan" else "ipvlans or a passthru macvlan"
        return f"{parent.name} is in use otherwise, as a bridge's port or by {others}: an interface carries one sort"
    if parent is not None and error.errno == errno.EINVAL:
        return f"{parent.name} cannot carry it (is it an interface of the right kind?)"
    return str(error).removeprefix(f"{error.action}: ")


_MODULES = {"ipoib": "ib_ipoib", "bond": "bonding"}


class Bond(ChildMode):
    """Two VFs of the pod, of different PFs, as one interface; one of them carries, the other stands by.

    The VFs come into the pod first, each by mode vf and with a row of its own. What this mode makes over them is the
    pod's alone: it ends with the namespace, and lets a VF go that leaves it, with what it had set on it
    (drivers/net/bonding, bond_release). So a bond and its VFs are undone in any order.

    Each VF keeps its MAC, and the bond has that of the VF that carries (fail_over_mac active). One MAC on both would be
    forged on one of them, which spoof checking stops; and had its PF set it on both, the switch inside the PF of the
    one that stands by would keep to itself what VFs beside it send to the bond. Neighbours are told of the MAC at each
    change.
    """

    def key(self, host: Host, conf: NetConf, container_id: str, ifname: str) -> str:
        """Name the VFs, the container and the interface."""
        return f"{'+'.join(conf.ports)}/{container_id}/{ifname}"

    def plan(self, host: Host, snapshot: Snapshot, target: Target) -> Planned:
        """Say what is to be made. Changes nothing."""
        conf = target.conf
        made = Child("bond", target.ifname, mode=conf.bond or "", mtu=conf.mtu, up=False, arp_targets=conf.arp_targets)
        extra = {"kind": made.kind, "ports": list(conf.ports)}
        undo = Undo("", mac="", mtu=conf.mtu or 0, up=True, mode=target.mode, extra=extra)
        return Planned(target, undo, child=made)

    def make(self, host: Host, planned: Planned, child: Child, netns: int) -> None:
        """Make the bond in the pod and have it take the VFs, which are down there.

        Raises HardwareError for a VF that is not there, or where one MTU is to be that of two.
        """
        ports = [_port(host, address, netns) for address in planned.undo.extra["ports"]]
        mtus = {port.mtu for port in ports}
        if len(mtus) > 1:
            told = " and ".join(f"{port.device} {port.mtu}" for port in ports)
            raise HardwareError(f"the VFs of {child.name} have different MTUs ({told}): say mtu in the network")
        _create(host, replace(child, mtu=mtus.pop()), None, netns)
        bond = _found(host, child.name, netns)
        for port in ports:
            host.links.change(port, LinkChange(master=bond.ifindex), netns)
        host.links.change(bond, LinkChange(up=True), netns)

    def differences(self, host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
        """Tell what about the bond is not as it was made. Its MAC is that of whichever VF carries."""
        link = find_child(host, attachment, netns)
        found = moving.link_differences(link, attachment)
        for address in attachment.undo.extra["ports"]:
            port = host.links.find_device(address, netns)
            if link is not None and (port is None or port.master != link.ifindex):
                found.append(f"{address} is no port of {attachment.ifname}")
        return found


def pairs(devices: Sequence[str], snapshot: Snapshot) -> tuple[tuple[str, str], ...]:
    """Pair VFs with VFs of other PFs. Raises RequestInvalid if not each of them has another."""
    by_pf: dict[str, list[str]] = {}
    for device in devices:
        facts = snapshot.by_address.get(device)
        by_pf.setdefault((facts.physfn if facts is not None else None) or device, []).append(device)
    half, odd = divmod(len(devices), 2)
    if odd or any(len(of_pf) > half for of_pf in by_pf.values()):
        told = ", ".join(f"{len(of_pf)} of {pf}" for pf, of_pf in by_pf.items())
        raise RequestInvalid(
            f"a bond joins two VFs of different PFs, and the pod has {len(devices)} ({told}): let it ask for two for"
            " each bond, of a resource with VFs of two PFs"
        )
    # In a list by PFs none of which has more than half, what is half a list away is of another PF.
    ordered = [device for of_pf in by_pf.values() for device in of_pf]
    return tuple(zip(ordered[:half], ordered[half:], strict=True))


def _port(host: Host, address: str, netns: int) -> Link:
    found = host.links.find_device(address, netns)
    if found is None:
        raise HardwareError(f"{address} is not in the pod, so no bond can take it")
    return found
