"""rtnetlink requests for the addresses and routes that a pod's interface gets, and one for the host's default. Pure.

Layout: include/uapi/linux/if_addr.h and rtnetlink.h. `addressing` lists what is there.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

from agent.hardware.host import Route
from agent.hardware.link_messages import attribute_table

RTM_NEWADDR, RTM_NEWROUTE, RTM_GETROUTE = 20, 24, 26
RT_SCOPE_UNIVERSE, RT_SCOPE_LINK = 0, 253
RT_TABLE_COMPAT, RT_TABLE_MAIN = 252, 254
RTPROT_STATIC = 4
RTN_UNICAST = 1
RTNH_F_ONLINK = 0x4
IFA_F_NODAD = 0x02
_IFA_ADDRESS, _IFA_LOCAL, _IFA_BROADCAST = 1, 2, 4
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_PREFSRC, _RTA_METRICS, _RTA_TABLE, _RTA_VIA = (
    *(1, 4, 5, 6, 7, 8),
    *(15, 18),
)
_RTA_MULTIPATH = 9
_RTM_F_FIB_MATCH = 0x2000
_NOWHERE = ipaddress.IPv4Address("192.0.2.1")
"""Nobody's (RFC 5737): what has no route of its own goes by the default one."""
_MOST_DEFAULT_BITS = 1
"""A default route may be written as two halves."""
_RTAX_MTU, _RTAX_ADVMSS = 2, 8

_IFADDRMSG = struct.Struct("=BBBBI")
_RTMSG = struct.Struct("=BBBBBBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_WORD = struct.Struct("=I")
_FAMILY = struct.Struct("=H")
_WAY = struct.Struct("=HBBi")
"""struct rtnexthop: length, flags, hops, interface."""
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


def address(ifindex: int, cidr: str) -> bytes:
    """Make the body of RTM_NEWADDR that gives an interface an address. Raises ValueError for what is none."""
    wanted = ipaddress.ip_interface(cidr)
    packed, length = wanted.ip.packed, wanted.network.prefixlen
    # The pod may use an IPv6 address at once: IPAM says that it is unique.
    flags = IFA_F_NODAD if wanted.version == 6 else 0
    body = _IFADDRMSG.pack(_FAMILIES[wanted.version], length, flags, RT_SCOPE_UNIVERSE, ifindex)
    body += _attribute(_IFA_LOCAL, packed) + _attribute(_IFA_ADDRESS, packed)
    if wanted.version == 4 and length < 31:
        body += _attribute(_IFA_BROADCAST, wanted.network.broadcast_address.packed)
    return body


def route(ifindex: int, wanted: Route) -> bytes:
    """Make the body of RTM_NEWROUTE for a route through an interface. Raises ValueError for addresses that are none."""
    network = ipaddress.ip_network(wanted.destination, strict=False)
    gateway = ipaddress.ip_address(wanted.gateway) if wanted.gateway else None
    table = wanted.table if wanted.table is not None else RT_TABLE_MAIN
    scope = wanted.scope
    if scope is None:
        # As ip-route(8): what needs no gateway is on the link.
        scope = RT_SCOPE_LINK if gateway is None and network.version == 4 else RT_SCOPE_UNIVERSE
    body = _RTMSG.pack(
        *(_FAMILIES[network.version], network.prefixlen, 0, 0),
        *(table if table < 256 else RT_TABLE_COMPAT, RTPROT_STATIC if wanted.protocol is None else wanted.protocol),
        *(scope, RTN_UNICAST, RTNH_F_ONLINK if wanted.onlink else 0),
    )
    body += _attribute(_RTA_TABLE, _WORD.pack(table)) + _attribute(_RTA_OIF, _WORD.pack(ifindex))
    if network.prefixlen:
        body += _attribute(_RTA_DST, network.network_address.packed)
    if gateway is not None and gateway.version == network.version:
        body += _attribute(_RTA_GATEWAY, gateway.packed)
    elif gateway is not None:
        body += _attribute(_RTA_VIA, _FAMILY.pack(_FAMILIES[gateway.version]) + gateway.packed)
    if wanted.priority is not None:
        body += _attribute(_RTA_PRIORITY, _WORD.pack(wanted.priority))
    if wanted.source is not None:
        body += _attribute(_RTA_PREFSRC, ipaddress.ip_address(wanted.source).packed)
    metrics = ((_RTAX_MTU, wanted.mtu), (_RTAX_ADVMSS, wanted.advmss))
    if found := b"".join(_attribute(kind, _WORD.pack(value)) for kind, value in metrics if value is not None):
        body += _attribute(_RTA_METRICS, found)
    return body


def default_question() -> bytes:
    """Make the body of RTM_GETROUTE that asks for the default route of IPv4, with all its ways."""
    return _RTMSG.pack(socket.AF_INET, 32, 0, 0, 0, 0, 0, 0, _RTM_F_FIB_MATCH) + _attribute(_RTA_DST, _NOWHERE.packed)


def default_ways(answer: bytes) -> tuple[int, ...]:
    """Read the answer to `default_question`: the numbers of the interfaces that the default route goes through."""
    if _RTMSG.unpack_from(answer)[1] > _MOST_DEFAULT_BITS:
        return ()
    found = attribute_table(answer, _RTMSG.size)
    ways, at = found.get(_RTA_MULTIPATH, b""), 0
    indices = [_WORD.unpack(found[_RTA_OIF])[0]] if _RTA_OIF in found else []
    while at + _WAY.size <= len(ways):
        length, _, _, index = _WAY.unpack_from(ways, at)
        indices.append(index)
        at += max((length + 3) & ~3, _WAY.size)
    return tuple(indices)


def _attribute(kind: int, payload: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)
