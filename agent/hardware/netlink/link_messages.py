"""rtnetlink messages about links: what the kernel says of one, what is worth a scan, and what makes a child. Pure.

Layout: include/uapi/linux/rtnetlink.h, if_link.h and if.h.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agent.hardware.host import Child
from agent.hardware.netlink.codec import WORD, attribute, attribute_table, attributes, messages, text, word
from agent.model.change import Change
from agent.model.device import is_pci_address

RTM_NEWLINK = 16
RTM_DELLINK = 17
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINK, IFLA_MASTER = 1, 3, 4, 5, 10
IFLA_LINKINFO, IFLA_IFALIAS = 18, 20
IFLA_NET_NS_FD, IFLA_EXT_MASK, IFLA_PHYS_PORT_NAME, IFLA_XDP = 28, 29, 38, 43
IFLA_PROP_LIST, IFLA_ALT_IFNAME = 52, 53
IFLA_PARENT_DEV_NAME, IFLA_PARENT_DEV_BUS_NAME = 56, 57
"""Since Linux 5.14, both."""
IFLA_INFO_KIND, IFLA_INFO_DATA = 1, 2
IFLA_MACVLAN_MODE = 1
IFLA_IPVLAN_MODE = 1
IFLA_BOND_MODE, IFLA_BOND_MIIMON, IFLA_BOND_FAIL_OVER_MAC, IFLA_BOND_NUM_PEER_NOTIF = 1, 3, 13, 16
IFLA_BOND_ARP_INTERVAL, IFLA_BOND_ARP_IP_TARGET, IFLA_BOND_ARP_VALIDATE = 7, 8, 9
IFLA_IPOIB_PKEY, IFLA_IPOIB_MODE, IFLA_IPOIB_UMCAST = 1, 2, 3
MACVLAN_MODES = {"private": 1, "vepa": 2, "bridge": 4, "passthru": 8}
IPVLAN_MODES = {"l2": 0, "l3": 1, "l3s": 2}
BOND_MODES = {"active-backup": 1}
BOND_MILLISECONDS = 100
"""How often a bond looks at its ports' links."""
BOND_ARP_MILLISECONDS = 200
"""How often a bond asks its targets: without an answer for half a second the port is taken for lost."""
BOND_NOTICES = 3
"""So often a bond tells its neighbours of another MAC: one that is lost would cost until they ask."""
FAIL_OVER_MAC_ACTIVE = 1
ARP_VALIDATE_ACTIVE = 1
"""Only answers count. Otherwise whatever comes in does, from VFs beside it, say, behind a dead cable."""
IPOIB_MODES = {"datagram": 0, "connected": 1}
IFLA_XDP_FD, IFLA_XDP_ATTACHED, IFLA_XDP_FLAGS = 1, 2, 3
IFNAMSIZ = 16
"""With the zero at its end: only alternative names may be longer, and are asked for as such."""
IFF_UP = 0x1
IFF_NOARP = 0x80
IFF_PROMISC = 0x100
IFF_ALLMULTI = 0x200
IFF_MULTICAST = 0x1000
IFF_LOWER_UP = 0x10000

LINK = struct.Struct("=BxHiII")
_ZERO = bytes(WORD.size)


@dataclass(frozen=True, slots=True)
class LinkMessage:
    """What the kernel says of one link."""

    ifindex: int
    flags: int
    attributes: Mapping[int, bytes]

    def text(self, kind: int) -> str | None:
        """Return a textual attribute, None if it is absent or empty."""
        return text(self.attributes.get(kind, b"")) or None

    def numbers(self, *kinds: int) -> list[int]:
        """Return 32-bit attributes, 0 for one that is absent."""
        get, unpack = self.attributes.get, WORD.unpack
        return [unpack(get(kind, _ZERO))[0] for kind in kinds]

    @property
    def altnames(self) -> tuple[str, ...]:
        """The other names the link answers to, in the kernel's order.

        They may be any bytes, and whoever takes one away must say the same ones.
        """
        content = self.attributes.get(IFLA_PROP_LIST)
        if content is None:
            return ()
        return tuple(
            value.rstrip(b"\0").decode("utf-8", "surrogateescape")
            for kind, value in attributes(content)
            if kind == IFLA_ALT_IFNAME
        )

    @property
    def kind(self) -> str:
        """The kind of a link of software, such as macvlan; empty for hardware."""
        content = self.attributes.get(IFLA_LINKINFO)
        if content is None:
            return ""
        found = attribute_table(content)
        return text(found.get(IFLA_INFO_KIND, b""))

    @property
    def xdp(self) -> int:
        """How an XDP program is attached (XDP_ATTACHED_*); 0 if none is."""
        return attribute_table(self.attributes.get(IFLA_XDP, b"")).get(IFLA_XDP_ATTACHED, b"\0")[0]


def link_events(
    packet: bytes, *, virtual_links: bool = False, device_attribute: int = IFLA_PARENT_DEV_NAME
) -> Iterator[tuple[str, Change]]:
    """Name the link changes in a netlink packet, `link eth0 changed` or `link eth0 gone`, and what is to be looked at.

    Without `virtual_links` links of software only (veth, bridge, …) are passed over. An interface
    of a bus device says its bus; older kernels do not, but only software links have a kind.
    `device_attribute` holds the PCI address of the function below; a simulated node has another.
    """
    for kind, _, body in messages(packet):
        if kind in (RTM_NEWLINK, RTM_DELLINK):
            found = attribute_table(body, LINK.size)
            on_a_bus = IFLA_PARENT_DEV_BUS_NAME in found
            if virtual_links or on_a_bus or IFLA_LINKINFO not in found:
                name = text(found.get(IFLA_IFNAME, b"?"))
                device = text(found.get(device_attribute, b""))
                # Something else than a function may be below, such as virtio's bus.
                change = Change(frozenset((device,) if is_pci_address(device) else ()), frozenset((name,)))
                yield f"link {name} {'changed' if kind == RTM_NEWLINK else 'gone'}", change


def decode(payload: bytes) -> LinkMessage:
    """Read the body of a link message."""
    _, _, ifindex, flags, _ = LINK.unpack_from(payload)
    return LinkMessage(ifindex, flags, attribute_table(payload, LINK.size))


def creation(child: Child, parent: int | None, netns: int | None) -> bytes:
    """Make the body of an RTM_NEWLINK that creates a child; one without a parent has none.

    The parent's index counts in the namespace of the socket; the child is made in the namespace of the
    descriptor (net/core/rtnetlink.c, rtnl_newlink_create), so it is never seen anywhere else.
    """
    up = IFF_UP if child.up else 0
    body = LINK.pack(socket.AF_UNSPEC, 0, 0, up, up)
    body += attribute(IFLA_IFNAME, child.name.encode() + b"\0")
    if parent is not None:
        body += word(IFLA_LINK, parent)
    if netns is not None:
        body += word(IFLA_NET_NS_FD, netns)
    if child.mac is not None:
        body += attribute(IFLA_ADDRESS, bytes.fromhex(child.mac.replace(":", "")))
    if child.mtu is not None:
        body += word(IFLA_MTU, child.mtu)
    info = attribute(IFLA_INFO_KIND, child.kind.encode())
    if child.kind in _DATA:
        info += attribute(IFLA_INFO_DATA, _DATA[child.kind](child))
    return body + attribute(IFLA_LINKINFO, info)


def _macvlan(child: Child) -> bytes:
    return word(IFLA_MACVLAN_MODE, MACVLAN_MODES[child.mode])


def _ipvlan(child: Child) -> bytes:
    return attribute(IFLA_IPVLAN_MODE, struct.pack("=H", IPVLAN_MODES[child.mode]))


def _bond(child: Child) -> bytes:
    data = attribute(IFLA_BOND_MODE, bytes((BOND_MODES[child.mode],)))
    if child.arp_targets:  # it does the one or the other
        asked = (attribute(n, socket.inet_aton(target)) for n, target in enumerate(child.arp_targets))
        data += word(IFLA_BOND_ARP_INTERVAL, BOND_ARP_MILLISECONDS)
        data += attribute(IFLA_BOND_ARP_IP_TARGET, b"".join(asked))
        data += word(IFLA_BOND_ARP_VALIDATE, ARP_VALIDATE_ACTIVE)
    else:
        data += word(IFLA_BOND_MIIMON, BOND_MILLISECONDS)
    data += attribute(IFLA_BOND_FAIL_OVER_MAC, bytes((FAIL_OVER_MAC_ACTIVE,)))
    return data + attribute(IFLA_BOND_NUM_PEER_NOTIF, bytes((BOND_NOTICES,)))


def _ipoib(child: Child) -> bytes:
    data = attribute(IFLA_IPOIB_PKEY, struct.pack("=H", child.pkey or 0)) if child.pkey is not None else b""
    data += attribute(IFLA_IPOIB_MODE, struct.pack("=H", IPOIB_MODES[child.mode]))
    return data + attribute(IFLA_IPOIB_UMCAST, struct.pack("=H", 1))


_DATA: Mapping[str, Callable[[Child], bytes]] = MappingProxyType(
    {"macvlan": _macvlan, "ipvlan": _ipvlan, "ipoib": _ipoib, "bond": _bond}
)
