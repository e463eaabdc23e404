"""Set a VF's VLAN with its protocol (IFLA_VF_VLAN_LIST), which pyroute2 encodes too short.

pyroute2 sends `struct ifla_vf_vlan_info` (include/uapi/linux/if_link.h) without its two bytes of padding,
and the kernel answers EINVAL to anything shorter (net/core/rtnetlink.c, do_setvfinfo). IFLA_VF_VLAN, the older
attribute, knows no 802.1ad.
"""

from __future__ import annotations

import os
import socket
import struct

NLM_F_REQUEST, NLM_F_ACK = 0x1, 0x4
NLMSG_ERROR, RTM_SETLINK = 2, 19
NLA_F_NESTED = 0x8000
IFLA_VFINFO_LIST, IFLA_VF_INFO, IFLA_VF_VLAN_LIST, IFLA_VF_VLAN_INFO = 22, 1, 12, 1

_MESSAGE = struct.Struct("=IHHII")
_INTERFACE = struct.Struct("=BxHiII")
_ANSWER_SECONDS = 60.0


def set_vf_vlan(ifindex: int, vf_index: int, *, vlan: int, qos: int, proto: int) -> None:
    """Set VLAN, priority and protocol (an EtherType) of a VF. Raises OSError with the kernel's errno."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as route:
        route.settimeout(_ANSWER_SECONDS)
        route.bind((0, 0))
        route.send(encode(ifindex, vf_index, vlan=vlan, qos=qos, proto=proto))
        answer = route.recv(65536)
    _, kind, _, _, _ = _MESSAGE.unpack_from(answer)
    (negative,) = struct.unpack_from("=i", answer, _MESSAGE.size)
    if kind == NLMSG_ERROR and negative != 0:
        raise OSError(-negative, os.strerror(-negative))


def encode(ifindex: int, vf_index: int, *, vlan: int, qos: int, proto: int) -> bytes:
    """Make the RTM_SETLINK request."""
    # All in the machine's byte order but the protocol, which is as on the wire.
    settings = struct.pack("=III", vf_index, vlan, qos) + struct.pack(">Hxx", proto)
    nested = _attribute(IFLA_VF_VLAN_INFO, settings)
    for kind in (IFLA_VF_VLAN_LIST, IFLA_VF_INFO, IFLA_VFINFO_LIST):
        nested = _attribute(kind | NLA_F_NESTED, nested)
    body = _INTERFACE.pack(socket.AF_UNSPEC, 0, ifindex, 0, 0) + nested
    return _MESSAGE.pack(_MESSAGE.size + len(body), RTM_SETLINK, NLM_F_REQUEST | NLM_F_ACK, 1, 0) + body


def _attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload
