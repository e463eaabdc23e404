"""rtnetlink messages taken apart, and what link messages are worth a scan. Pure.

Layout: include/uapi/linux/netlink.h and rtnetlink.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from agent.model.change import Change
from agent.model.device import is_pci_address

RTM_NEWLINK = 16
RTM_DELLINK = 17
IFLA_IFNAME = 3
IFLA_LINKINFO = 18
IFLA_PARENT_DEV_NAME = 56
IFLA_PARENT_DEV_BUS_NAME = 57
"""Since Linux 5.14, both."""

_HEADER = struct.Struct("=IHHII")
_IFINFOMSG_BYTES = 16
_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF


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
            found = attribute_table(body, _IFINFOMSG_BYTES)
            on_a_bus = IFLA_PARENT_DEV_BUS_NAME in found
            if virtual_links or on_a_bus or IFLA_LINKINFO not in found:
                name = _text(found.get(IFLA_IFNAME, b"?"))
                device = _text(found.get(device_attribute, b""))
                # Something else than a function may be below, such as virtio's bus.
                change = Change(frozenset((device,) if is_pci_address(device) else ()), frozenset((name,)))
                yield f"link {name} {'changed' if kind == RTM_NEWLINK else 'gone'}", change


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode("utf-8", "replace")


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
