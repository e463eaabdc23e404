"""Requests that make an interface upon another: macvlan and IPoIB children. Pure.

Layout: include/uapi/linux/if_link.h.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType

from agent.hardware.host import Child

IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINK, IFLA_LINKINFO, IFLA_NET_NS_FD = 1, 3, 4, 5, 18, 28
IFLA_INFO_KIND, IFLA_INFO_DATA = 1, 2
IFLA_MACVLAN_MODE = 1
IFLA_IPOIB_PKEY, IFLA_IPOIB_MODE, IFLA_IPOIB_UMCAST = 1, 2, 3
MACVLAN_MODES = {"private": 1, "vepa": 2, "bridge": 4, "passthru": 8}
IPOIB_MODES = {"datagram": 0, "connected": 1}
IFF_UP = 0x1

_LINK = struct.Struct("=BxHiII")
_ATTRIBUTE = struct.Struct("=HH")


def creation(child: Child, parent: int, netns: int | None) -> bytes:
    """Make the body of an RTM_NEWLINK that creates a child.

    The parent's index counts in the namespace of the socket; the child is made in the namespace of the
    descriptor (net/core/rtnetlink.c, rtnl_newlink_create), so it is never seen anywhere else.
    """
    up = IFF_UP if child.up else 0
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, up, up)
    body += _attribute(IFLA_IFNAME, child.name.encode() + b"\0")
    body += _attribute(IFLA_LINK, struct.pack("=I", parent))
    if netns is not None:
        body += _attribute(IFLA_NET_NS_FD, struct.pack("=I", netns))
    if child.mac is not None:
        body += _attribute(IFLA_ADDRESS, bytes.fromhex(child.mac.replace(":", "")))
    if child.mtu is not None:
        body += _attribute(IFLA_MTU, struct.pack("=I", child.mtu))
    info = _attribute(IFLA_INFO_KIND, child.kind.encode())
    if child.kind in _DATA:
        info += _attribute(IFLA_INFO_DATA, _DATA[child.kind](child))
    return body + _attribute(IFLA_LINKINFO, info)


def _macvlan(child: Child) -> bytes:
    return _attribute(IFLA_MACVLAN_MODE, struct.pack("=I", MACVLAN_MODES[child.mode]))


def _ipoib(child: Child) -> bytes:
    data = _attribute(IFLA_IPOIB_PKEY, struct.pack("=H", child.pkey or 0)) if child.pkey is not None else b""
    data += _attribute(IFLA_IPOIB_MODE, struct.pack("=H", IPOIB_MODES[child.mode]))
    return data + _attribute(IFLA_IPOIB_UMCAST, struct.pack("=H", 1))


def _attribute(kind: int, payload: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


_DATA: Mapping[str, Callable[[Child], bytes]] = MappingProxyType({"macvlan": _macvlan, "ipoib": _ipoib})
