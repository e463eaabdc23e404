"""What /proc does not show of the host's default routes, asked by netlink.

/proc/net/route shows the first way only of a route that has several. /proc/net/ipv6_route shows the routes of all
tables, and not that a program made one of a router's advertisement, as systemd-networkd and NetworkManager do.
Layout: include/uapi/linux/rtnetlink.h.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from agent.hardware.netlink.codec import (
    NLM_F_DUMP,
    NLMSG_DONE,
    NLMSG_ERROR,
    WORD,
    attribute,
    attribute_table,
    messages,
    request,
)

RTM_NEWROUTE, RTM_GETROUTE = 24, 26
RT_TABLE_MAIN, RTPROT_RA, RTN_UNICAST = 254, 9, 1
_RTA_DST, _RTA_OIF, _RTA_PRIORITY, _RTA_MULTIPATH = 1, 4, 6, 9
_RTM_F_FIB_MATCH = 0x2000
_SOL_NETLINK, _NETLINK_GET_STRICT_CHK = 270, 12
_NOWHERE = ipaddress.IPv4Address("192.0.2.1")
"""Nobody's (RFC 5737): what has no route of its own goes by the default one."""
_MOST_DEFAULT_BITS = 1
"""A default route may be written as two halves."""
_RTMSG = struct.Struct("=BBBBBBBBI")
"""Family, lengths of destination and source, TOS, table, protocol, scope, type, flags."""
_WAY = struct.Struct("=HBBi")
"""struct rtnexthop: length, flags, hops, interface."""
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)
"""There is none, or one that refuses: unreachable, prohibit, blackhole."""
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EOPNOTSUPP, errno.ENOENT)
"""IPv6 is off."""
_RECEIVE_BYTES = 64 << 10
_PATIENCE = 5.0
"""Seconds: the kernel answers at once."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Interfaces by number."""

    default: tuple[int, ...] = ()
    """All ways of the best default route of IPv4."""
    of_ipv6: tuple[tuple[int, int, bool], ...] = ()
    """Ways of the default routes of IPv6 in the main table, with the metric, and whether a router advertises it."""
    to_api: tuple[int, ...] = ()
    """The way to the API server."""


def read_ways(api_server: str | None) -> Ways:
    """Ask the kernel, in the calling thread's network namespace. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as asking:
        asking.settimeout(_PATIENCE)
        default = _lookup(asking, _NOWHERE, _MOST_DEFAULT_BITS, _RTM_F_FIB_MATCH)
        to_api = _lookup(asking, ipaddress.ip_address(api_server), 128) if api_server is not None else ()
        try:
            of_ipv6 = tuple(_ipv6_defaults(asking))
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
            of_ipv6 = ()
    return Ways(default, of_ipv6, to_api)


def _lookup(
    asking: socket.socket, address: ipaddress.IPv4Address | ipaddress.IPv6Address, most_bits: int, flags: int = 0
) -> tuple[int, ...]:
    """List the interfaces of the route to an address; none if it is more special than `most_bits`."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    body = _RTMSG.pack(family, address.max_prefixlen, 0, 0, 0, 0, 0, 0, flags) + attribute(_RTA_DST, address.packed)
    asking.send(request(RTM_GETROUTE, 0, body))
    for kind, payload in _answers(asking, _NO_ROUTE):
        if kind == RTM_NEWROUTE and _RTMSG.unpack_from(payload)[1] <= most_bits:
            return _ways(attribute_table(payload, _RTMSG.size))
        break
    return ()


def _ipv6_defaults(asking: socket.socket) -> Iterator[tuple[int, int, bool]]:
    with contextlib.suppress(OSError):  # before Linux 4.20 the kernel lists the routes of all tables
        asking.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
    body = _RTMSG.pack(socket.AF_INET6, 0, 0, 0, RT_TABLE_MAIN, 0, 0, RTN_UNICAST, 0)
    asking.send(request(RTM_GETROUTE, NLM_F_DUMP, body))
    for kind, payload in _answers(asking):
        if kind == NLMSG_DONE:
            return
        if kind == RTM_NEWROUTE:
            _, length, _, _, table, made_by, *_ = _RTMSG.unpack_from(payload)
            if length == 0 and table == RT_TABLE_MAIN:
                found = attribute_table(payload, _RTMSG.size)
                metric = WORD.unpack(found[_RTA_PRIORITY])[0] if _RTA_PRIORITY in found else 0
                yield from ((index, metric, made_by == RTPROT_RA) for index in _ways(found))


def _answers(asking: socket.socket, expected: tuple[int, ...] = ()) -> Iterator[tuple[int, bytes]]:
    """Yield type and body of what the kernel answers. Raises OSError for a refusal that is not expected."""
    while True:
        packet, sender = asking.recvfrom(_RECEIVE_BYTES)
        if sender[0] != 0:
            continue  # a process's, a pod's for one
        for kind, _, payload in messages(packet):
            if kind in (NLMSG_ERROR, NLMSG_DONE):
                number = -int.from_bytes(payload[:4], "little", signed=True)
                if number > 0 and number not in expected:
                    raise OSError(number, os.strerror(number))
            yield kind, payload


def _ways(found: dict[int, bytes]) -> tuple[int, ...]:
    """List the interfaces that a route goes through, of one way or of several."""
    ways, at = found.get(_RTA_MULTIPATH, b""), 0
    indices = [WORD.unpack(found[_RTA_OIF])[0]] if _RTA_OIF in found else []
    while at + _WAY.size <= len(ways):
        length, _, _, index = _WAY.unpack_from(ways, at)
        indices.append(index)
        at += max((length + 3) & ~3, _WAY.size)
    return tuple(indices)
