"""rtnetlink messages taken apart: what they say of a link, and what is worth a scan. Pure.

Layout: include/uapi/linux/netlink.h, rtnetlink.h, if_link.h and if.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent.model.change import Change
from agent.model.device import is_pci_address

RTM_NEWLINK = 16
RTM_DELLINK = 17
IFLA_ADDRESS, IFLA_BROADCAST, IFLA_IFNAME, IFLA_MTU, IFLA_MASTER = 1, 2, 3, 4, 10
IFLA_TXQLEN, IFLA_LINKMODE, IFLA_LINKINFO, IFLA_IFALIAS, IFLA_GROUP = 13, 17, 18, 20, 27
IFLA_NET_NS_FD, IFLA_EXT_MASK, IFLA_PHYS_PORT_NAME, IFLA_XDP = 28, 29, 38, 43
IFLA_PROP_LIST, IFLA_ALT_IFNAME = 52, 53
IFLA_PARENT_DEV_NAME, IFLA_PARENT_DEV_BUS_NAME = 56, 57
"""Since Linux 5.14, both."""
OFFLOAD_LIMITS = (41, 40, 58, 63, 64)
"""IFLA_{GSO_MAX_SIZE,GSO_MAX_SEGS,GRO_MAX_SIZE,GSO_IPV4_MAX_SIZE,GRO_IPV4_MAX_SIZE}: the kernel takes them so."""
IFLA_INFO_KIND = 1
IFLA_XDP_FD, IFLA_XDP_ATTACHED, IFLA_XDP_FLAGS = 1, 2, 3
IFNAMSIZ = 16
"""With the zero at its end: only alternative names may be longer, and are asked for as such."""
IFF_UP = 0x1
IFF_NOARP = 0x80
IFF_PROMISC = 0x100
IFF_ALLMULTI = 0x200
IFF_MULTICAST = 0x1000
IFF_LOWER_UP = 0x10000

_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ATTRIBUTE = struct.Struct("=HH")
_WORD = struct.Struct("=I")
_ZERO = bytes(_WORD.size)
_TYPE_MASK = 0x3FFF


@dataclass(frozen=True, slots=True)
class LinkMessage:
    """What the kernel says of one link."""

    ifindex: int
    flags: int
    attributes: Mapping[int, bytes]

    def text(self, kind: int) -> str | None:
        """Return a textual attribute, None if it is absent or empty."""
        return self.attributes.get(kind, b"").rstrip(b"\0").decode("utf-8", "replace") or None

    def numbers(self, *kinds: int) -> list[int]:
        """Return 32-bit attributes, 0 for one that is absent."""
        get, unpack = self.attributes.get, _WORD.unpack
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
        return found.get(IFLA_INFO_KIND, b"").rstrip(b"\0").decode("utf-8", "replace")

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
            found = attribute_table(body, _LINK.size)
            on_a_bus = IFLA_PARENT_DEV_BUS_NAME in found
            if virtual_links or on_a_bus or IFLA_LINKINFO not in found:
                name = _text(found.get(IFLA_IFNAME, b"?"))
                device = _text(found.get(device_attribute, b""))
                # Something else than a function may be below, such as virtio's bus.
                change = Change(frozenset((device,) if is_pci_address(device) else ()), frozenset((name,)))
                yield f"link {name} {'changed' if kind == RTM_NEWLINK else 'gone'}", change


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode("utf-8", "replace")


def decode(payload: bytes) -> LinkMessage:
    """Read the body of a link message."""
    _, _, ifindex, flags, _ = _LINK.unpack_from(payload)
    return LinkMessage(ifindex, flags, attribute_table(payload, _LINK.size))


def messages(packet: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield each message of a packet: its type, its flags, its body. Ends at the first that makes no sense."""
    offset = 0
    while offset + _HEADER.size <= len(packet):
        length, kind, flags, _, _ = _HEADER.unpack_from(packet, offset)
        if length < _HEADER.size:
            return
        yield kind, flags, packet[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def attributes(body: bytes) -> list[tuple[int, bytes]]:
    """List type and content of each attribute. Ends at the first that makes no sense."""
    found = []
    unpack, size, end, offset = _ATTRIBUTE.unpack_from, _ATTRIBUTE.size, len(body), 0
    while offset + size <= end:
        length, kind = unpack(body, offset)
        if length < size:
            break
        found.append((kind & _TYPE_MASK, body[offset + size : offset + length]))
        offset += (length + 3) & ~3
    return found


def attribute_table(body: bytes, start: int = 0) -> dict[int, bytes]:
    """Return the content of each attribute by its type; of several of one type, the last. Ends as `attributes` does.

    In one pass: a pod's start waits for it.
    """
    found = {}
    unpack, size, end, offset = _ATTRIBUTE.unpack_from, _ATTRIBUTE.size, len(body), start
    while offset + size <= end:
        length, kind = unpack(body, offset)
        if length < size:
            break
        found[kind & _TYPE_MASK] = body[offset + size : offset + length]
        offset += (length + 3) & ~3
    return found
