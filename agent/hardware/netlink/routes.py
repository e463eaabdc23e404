"""What there is of addresses, routes, rules and neighbours, and the ways out of the host.

/proc/net/route shows the first way only of a route that has several. /proc/net/ipv6_route shows the routes of all
tables, and not that a program made one of a router's advertisement, as systemd-networkd and NetworkManager do.
Layout: include/uapi/linux/rtnetlink.h.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from agent.hardware.host import LinkPolicy, Neighbour, Route, Rule
from agent.hardware.netlink.configuring import (
    FR_ACT_TO_TBL,
    FRA_DST,
    FRA_FWMARK,
    FRA_IIFNAME,
    FRA_OIFNAME,
    FRA_PRIORITY,
    FRA_SRC,
    FRA_TABLE,
    IFA_ADDRESS,
    IFADDRMSG,
    IFLA_AF_SPEC,
    IFLA_INET_CONF,
    IPV4_SETTINGS,
    IPV6_SETTINGS,
    NDA_DST,
    NDA_LLADDR,
    NEIGHBOUR,
    NUD_PERMANENT,
    RT_SCOPE_UNIVERSE,
    RT_TABLE_MAIN,
    RTA_DST,
    RTA_GATEWAY,
    RTA_OIF,
    RTA_PREFSRC,
    RTA_PRIORITY,
    RTA_TABLE,
    RTMSG,
    RTN_UNICAST,
    RTNH_F_ONLINK,
)
from agent.hardware.netlink.rtnetlink import WORD, LinkMessage, NetlinkSocket, attribute, attribute_table, text

RTM_GETADDR, RTM_GETROUTE, RTM_GETNEIGH, RTM_GETRULE = 22, 26, 30, 34
RT_TABLE_LOCAL = 255
RTPROT_KERNEL, RTPROT_RA = 2, 9
_RTA_MULTIPATH = 9
_RTM_F_FIB_MATCH = 0x2000
_IFLA_INET6_CONF = 2
_NOWHERE = ipaddress.IPv4Address("192.0.2.1")
"""Nobody's (RFC 5737): what has no route of its own goes by the default one."""
_MOST_DEFAULT_BITS = 1
"""A default route may be written as two halves."""
_WAY = struct.Struct("=HBBi")
"""struct rtnexthop: length, flags, hops, interface."""
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)
"""There is none, or one that refuses: unreachable, prohibit, blackhole."""
_FAMILIES = (socket.AF_INET, socket.AF_INET6)

Table = Mapping[int, bytes]


def read_addresses(links: NetlinkSocket, ifindex: int) -> tuple[str, ...]:
    """List an interface's global addresses as CIDR. Raises OSError."""

    def read(body: bytes) -> str | None:
        family, length, _, scope, index = IFADDRMSG.unpack_from(body)
        if (index, scope) != (ifindex, RT_SCOPE_UNIVERSE):
            return None
        return f"{socket.inet_ntop(family, attribute_table(body, IFADDRMSG.size)[IFA_ADDRESS])}/{length}"

    return tuple(links.dump(RTM_GETADDR, IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0), read))


def read_routes(links: NetlinkSocket, ifindex: int | None) -> tuple[Route, ...]:
    """List the routes, through one interface or through any, but those to local addresses. Raises OSError."""
    return tuple(
        route
        for family in _FAMILIES
        for routes in links.dump(RTM_GETROUTE, _of_family(family), partial(_routes, family, ifindex))
        for route in routes
    )


def read_policy(links: NetlinkSocket, link: LinkMessage) -> LinkPolicy:
    """Read an interface's settings and lasting neighbours, and all rules that name a table. Raises OSError."""

    def neighbour(body: bytes) -> Neighbour | None:
        family, index, state, _, _ = NEIGHBOUR.unpack_from(body)
        if index != link.ifindex or not state & NUD_PERMANENT:
            return None
        found = attribute_table(body, NEIGHBOUR.size)
        return Neighbour(socket.inet_ntop(family, found[NDA_DST]), found.get(NDA_LLADDR, b"").hex(":"))

    rules = [rule for f in _FAMILIES for rule in links.dump(RTM_GETRULE, _of_family(f), partial(_rule, f))]
    neighbours = links.dump(RTM_GETNEIGH, NEIGHBOUR.pack(socket.AF_UNSPEC, 0, 0, 0, 0), neighbour)
    return LinkPolicy(tuple(rules), tuple(neighbours), read_settings(link.attributes))


def read_settings(link: Table) -> dict[str, int]:
    """Read the settings of an interface from its attributes. Of a family that is off there are none."""
    families = attribute_table(link.get(IFLA_AF_SPEC, b""))
    found = {}
    for family, kind, names, first in (
        (socket.AF_INET, IFLA_INET_CONF, IPV4_SETTINGS, 1),
        (socket.AF_INET6, _IFLA_INET6_CONF, IPV6_SETTINGS, 0),
    ):
        values = attribute_table(families.get(family, b"")).get(kind, b"")
        for name, number in names.items():
            at = (number - first) * WORD.size
            if at + WORD.size <= len(values):
                found[name] = WORD.unpack_from(values, at)[0]
    return found


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
    with NetlinkSocket() as links:
        of_ipv6 = links.dump(RTM_GETROUTE, _of_family(socket.AF_INET6), _ipv6_defaults)
        return Ways(
            _lookup(links, _NOWHERE, _MOST_DEFAULT_BITS, _RTM_F_FIB_MATCH),
            tuple(way for ways in of_ipv6 for way in ways),
            _lookup(links, ipaddress.ip_address(api_server), 128) if api_server is not None else (),
        )


def _lookup(
    links: NetlinkSocket, address: ipaddress.IPv4Address | ipaddress.IPv6Address, most_bits: int, flags: int = 0
) -> tuple[int, ...]:
    """List the interfaces of the route to an address; none if it is more special than `most_bits`."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    body = RTMSG.pack(family, address.max_prefixlen, 0, 0, 0, 0, 0, 0, flags) + attribute(RTA_DST, address.packed)
    answer = links.answer(RTM_GETROUTE, body, _NO_ROUTE)
    if answer is None or RTMSG.unpack_from(answer)[1] > most_bits:
        return ()
    return tuple(index for index, _, _ in _ways(attribute_table(answer, RTMSG.size), 0))


def _ipv6_defaults(body: bytes) -> list[tuple[int, int, bool]] | None:
    family, length, _, _, table, made_by, _, kind, _ = RTMSG.unpack_from(body)
    if (family, length, table, kind) != (socket.AF_INET6, 0, RT_TABLE_MAIN, RTN_UNICAST):
        return None
    found = attribute_table(body, RTMSG.size)
    return [(index, _number(found, RTA_PRIORITY) or 0, made_by == RTPROT_RA) for index, _, _ in _ways(found, 0)]


def _routes(wanted: int, ifindex: int | None, body: bytes) -> list[Route] | None:
    """Read a route of a family, once for each of its ways through one interface or through any."""
    family, length, _, _, _, made_by, _, kind, flags = RTMSG.unpack_from(body)
    found = attribute_table(body, RTMSG.size)
    table = _number(found, RTA_TABLE)
    if (family, kind) != (wanted, RTN_UNICAST) or table == RT_TABLE_LOCAL:
        return None
    wide = "0.0.0.0" if family == socket.AF_INET else "::"  # noqa: S104 -- the default route's destination
    return [
        Route(
            f"{_address(family, found, RTA_DST) or wide}/{length}",
            _address(family, way, RTA_GATEWAY),
            priority=_number(found, RTA_PRIORITY),
            table=table if table != RT_TABLE_MAIN else None,
            source=_address(family, found, RTA_PREFSRC),
            onlink=bool(marks & RTNH_F_ONLINK),
            protocol=made_by,
            by_itself=made_by in (RTPROT_KERNEL, RTPROT_RA),
        )
        for index, marks, way in _ways(found, flags)
        if ifindex in (None, index)
    ]


def _ways(route: Table, flags: int) -> Iterator[tuple[int, int, Table]]:
    """Yield the interfaces that a route goes through, each with its flags and what has its gateway."""
    if (index := _number(route, RTA_OIF)) is not None:
        yield index, flags, route
    ways, at = route.get(_RTA_MULTIPATH, b""), 0
    while at + _WAY.size <= len(ways):
        length, marks, _, index = _WAY.unpack_from(ways, at)
        yield index, marks, attribute_table(ways[at : at + length], _WAY.size)
        at += max((length + 3) & ~3, _WAY.size)


def _rule(wanted: int, body: bytes) -> Rule | None:
    family, of_destination, of_source, _, _, _, _, action, _ = RTMSG.unpack_from(body)  # as struct fib_rule_hdr
    found = attribute_table(body, RTMSG.size)
    if (family, action) != (wanted, FR_ACT_TO_TBL):
        return None
    source, destination = (_address(family, found, kind) for kind in (FRA_SRC, FRA_DST))
    return Rule(
        _number(found, FRA_TABLE) or 0,
        _number(found, FRA_PRIORITY) or 0,
        source=f"{source}/{of_source}" if source else None,
        destination=f"{destination}/{of_destination}" if destination else None,
        iif=text(found.get(FRA_IIFNAME, b"")) or None,
        oif=text(found.get(FRA_OIFNAME, b"")) or None,
        fwmark=_number(found, FRA_FWMARK),
        version=4 if family == socket.AF_INET else 6,
    )


def _of_family(family: int) -> bytes:
    return RTMSG.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)


def _number(found: Table, kind: int) -> int | None:
    return int(WORD.unpack(found[kind])[0]) if kind in found else None


def _address(family: int, found: Table, kind: int) -> str | None:
    return socket.inet_ntop(family, found[kind]) if kind in found else None
