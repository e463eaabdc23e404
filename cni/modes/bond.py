"""Mode `bond`: two VFs of the pod, of different PFs, as one interface; one of them carries, the other stands by.

The VFs come into the pod first, each by mode vf and with a row of its own. What this mode makes over them is the pod's
alone: it ends with the namespace, and lets a VF go that leaves it, with what it had set on it (drivers/net/bonding,
bond_release). So a bond and its VFs are undone in any order.

Each VF keeps its MAC, and the bond has that of the VF that carries (fail_over_mac active). One MAC on both would be
forged on one of them, which spoof checking stops; and had its PF set it on both, the switch inside the PF of the one
that stands by would keep to itself what VFs beside it send to the bond. Neighbours are told of the MAC at each change.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace

from agent.errors import HardwareError, NetlinkFailed, RequestInvalid
from agent.hardware.host import Child, Host, Link, LinkChange
from agent.model.allocation import Attachment, Undo
from agent.model.device import Snapshot
from cni.modes.child import ChildMode, find_child
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.modes.moving import link_differences
from cni.netconf import NetConf


class Bond(ChildMode):
    """Made in the pod, of VFs that are there already."""

    def key(self, host: Host, conf: NetConf, container_id: str, ifname: str) -> str:
        """Name the VFs, the container and the interface."""
        return f"{'+'.join(conf.ports)}/{container_id}/{ifname}"

    def plan(self, host: Host, snapshot: Snapshot, target: Target) -> Planned:
        """Say what is to be made. Changes nothing."""
        conf = target.conf
        made = Child("bond", target.ifname, mode=conf.bond or "", mtu=conf.mtu, up=False, arp_targets=conf.arp_targets)
        extra = {"kind": made.kind, "ports": list(conf.ports)}
        undo = Undo("", mac="", mtu=conf.mtu or 0, up=True, mode=target.mode, extra=extra)
        return Planned(target.device, target.ifname, undo, altnames=conf.altnames, child=made)

    def enter(self, host: Host, planned: Planned, netns: int) -> InterfaceFacts:
        """Make the bond in the pod and have it take the VFs, which are down there.

        Raises HardwareError for a VF that is not there, or where one MTU is to be that of two.
        """
        made, links = planned.child, host.links
        assert made is not None
        ports = [_port(host, address, netns) for address in planned.undo.extra["ports"]]
        mtus = {port.mtu for port in ports}
        if len(mtus) > 1:
            told = " and ".join(f"{port.device} {port.mtu}" for port in ports)
            raise HardwareError(f"the VFs of {made.name} have different MTUs ({told}): say mtu in the network")
        try:
            links.create(replace(made, mtu=mtus.pop()), None, netns)
        except NetlinkFailed as error:
            raise NetlinkFailed(error.action, error.errno, _why(made, error)) from error
        bond = links.find(made.name, netns)
        if bond is None:
            raise HardwareError(f"bond {made.name} was made in the pod but is not there")
        for port in ports:
            links.change(port, LinkChange(master=bond.ifindex), netns)
        links.change(bond, LinkChange(up=True), netns)
        if planned.altnames:
            links.change_altnames(bond, add=planned.altnames, netns=netns)
        found = links.find(made.name, netns) or bond
        return InterfaceFacts(found.name, found.mac, found.mtu, None)

    def differences(self, host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
        """Tell what about the bond is not as it was made. Its MAC is that of whichever VF carries."""
        request, ifname = attachment.request, attachment.ifname
        link = find_child(host, attachment, netns)
        if link is None:
            return [f"interface {ifname} is not in the pod"]
        altnames = tuple(request.get("altnames", ()))
        found = link_differences(link, ifname, link.mac, request["mtu"] or link.mtu, altnames)
        for address in attachment.undo.extra["ports"]:
            port = host.links.find_device(address, netns)
            if port is None or port.master != link.ifindex:
                found.append(f"{address} is no port of {ifname}")
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


def _why(made: Child, error: NetlinkFailed) -> str:
    if error.errno == errno.EEXIST:
        return f"an interface called {made.name} is in the pod already"
    if error.errno == errno.EOPNOTSUPP:
        return "the kernel has no bonds: load the module bonding"
    return str(error).removeprefix(f"{error.action}: ")
