"""What /proc does not show of the host's default routes, asked by netlink.

/proc/net/route shows the first way only of a route that has several. /proc/net/ipv6_route shows the routes of all
tables, and not that a program made one of a router's advertisement, as systemd-networkd and NetworkManager do.
Layout: include/uapi/linux/rtnetlink.h.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from agent.hardware.netlink.rtnetlink import WORD, NetlinkSocket, attribute, attribute_table

RTM_GETROUTE = 26
RT_TABLE_MAIN, RTPROT_RA, RTN_UNICAST = 254, 9, 1
_RTA_DST, _RTA_OIF, _RTA_PRIORITY, _RTA_MULTIPATH = 1, 4, 6, 9
_RTM_F_FIB_MATCH = 0x2000
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
_PATIENCE = 5.0
"""Seconds: the kernel answers at once."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Interfaces by name."""

    default: tuple[str, ...] = ()
    """All ways of the best default route of IPv4."""
    of_ipv6: tuple[tuple[str, int, bool], ...] = ()
    """Ways of the default routes of IPv6 in the main table, with the metric, and whether a router advertises it."""
    to_api: tuple[str, ...] = ()
    """The way to the API server."""


def read_ways(api_server: str | None) -> Ways:
    """Ask the kernel, in the calling thread's network namespace. Raises OSError."""
    with NetlinkSocket(seconds=_PATIENCE) as links:
        body = _RTMSG.pack(socket.AF_INET6, 0, 0, 0, RT_TABLE_MAIN, 0, 0, RTN_UNICAST, 0)
        return Ways(
            _lookup(links, _NOWHERE, _MOST_DEFAULT_BITS, _RTM_F_FIB_MATCH),
            tuple(way for ways in links.dump(RTM_GETROUTE, body, _ipv6_defaults) for way in ways),
            _lookup(links, ipaddress.ip_address(api_server), 128) if api_server is not None else (),
        )


def _lookup(
    links: NetlinkSocket, address: ipaddress.IPv4Address | ipaddress.IPv6Address, most_bits: int, flags: int = 0
) -> tuple[str, ...]:
    """List the interfaces of the route to an address; none if it is more special than `most_bits`."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    body = _RTMSG.pack(family, address.max_prefixlen, 0, 0, 0, 0, 0, 0, flags) + attribute(_RTA_DST, address.packed)
    answer = links.answer(RTM_GETROUTE, body, _NO_ROUTE)
    if answer is None or _RTMSG.unpack_from(answer)[1] > most_bits:
        return ()
    return tuple(_ways(attribute_table(answer, _RTMSG.size)))


def _ipv6_defaults(body: bytes) -> list[tuple[str, int, bool]] | None:
    """Read a default route of the main table. The kernel lists those of all tables, where IPv6 is off of IPv4."""
    family, length, _, _, table, made_by, _, kind, _ = _RTMSG.unpack_from(body)
    if (family, length, table, kind) != (socket.AF_INET6, 0, RT_TABLE_MAIN, RTN_UNICAST):
        return None
    found = attribute_table(body, _RTMSG.size)
    metric = WORD.unpack(found[_RTA_PRIORITY])[0] if _RTA_PRIORITY in found else 0
    return [(name, metric, made_by == RTPROT_RA) for name in _ways(found)]


def _ways(found: dict[int, bytes]) -> Iterator[str]:
    """Name the interfaces that a route goes through, of one way or of several, but those that are gone by now."""
    ways, at = found.get(_RTA_MULTIPATH, b""), 0
    indices = [WORD.unpack(found[_RTA_OIF])[0]] if _RTA_OIF in found else []
    while at + _WAY.size <= len(ways):
        length, _, _, index = _WAY.unpack_from(ways, at)
        indices.append(index)
        at += max((length + 3) & ~3, _WAY.size)
    for index in indices:
        with contextlib.suppress(OSError):
            yield socket.if_indextoname(index)
