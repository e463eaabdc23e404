"""Lists of addresses, routes, rules and neighbours, through a pyroute2 socket that the caller opened where they are."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from agent.errors import NetlinkFailed
from agent.hardware.host import Link, LinkPolicy, Neighbour, Route, Rule
from agent.hardware.netlink.address_messages import told_settings
from agent.hardware.netlink.link_messages import LinkMessage
from agent.hardware.netlink.rtnetlink import translated
from agent.model.default_routes import DefaultRoute, only_ways

RT_SCOPE_UNIVERSE = 0
RTN_UNICAST = 1
RT_TABLE_MAIN, RT_TABLE_LOCAL = 254, 255
RTPROT_KERNEL, RTPROT_RA = 2, 9
RTNH_F_ONLINK = 0x4
FR_ACT_TO_TBL = 1
NUD_PERMANENT = 0x80


def addresses(ipr: IPRoute, link: Link) -> tuple[str, ...]:
    """List an interface's global addresses as CIDR."""
    with _translated(f"list addresses of {link.name}"):
        messages = list(ipr.addr("dump", index=link.ifindex, scope=RT_SCOPE_UNIVERSE))
    return tuple(f"{m.get_attr('IFA_ADDRESS')}/{m['prefixlen']}" for m in messages)


def routes(ipr: IPRoute, link: Link | None) -> tuple[Route, ...]:
    """List the routes, of an interface or of all, but those to local addresses."""
    found: list[Route] = []
    for message in _messages(ipr):
        if message["type"] == RTN_UNICAST and message.get_attr("RTA_TABLE") != RT_TABLE_LOCAL:
            found += _routes(message, link.ifindex if link is not None else None)
    return tuple(found)


def policy(ipr: IPRoute, link: LinkMessage) -> LinkPolicy:
    """Read an interface's settings and lasting neighbours, and all rules that name a table."""
    with _translated("list rules and neighbours"):
        rules = [rule for family in (socket.AF_INET, socket.AF_INET6) for rule in ipr.rule("dump", family=family)]
        neighbours = list(ipr.neigh("dump", ifindex=link.ifindex))
    return LinkPolicy(
        tuple(_rule(message) for message in rules if message["action"] == FR_ACT_TO_TBL),
        tuple(
            Neighbour(one.get_attr("NDA_DST"), one.get_attr("NDA_LLADDR"))
            for one in neighbours
            if one["state"] & NUD_PERMANENT and one["ifindex"] == link.ifindex
        ),
        told_settings(link.attributes),
    )


def _rule(message: Any) -> Rule:
    def cidr(key: str, length: int) -> str | None:
        address = message.get_attr(key)
        return f"{address}/{length}" if address is not None else None

    return Rule(
        message.get_attr("FRA_TABLE"),
        message.get_attr("FRA_PRIORITY") or 0,
        source=cidr("FRA_SRC", message["src_len"]),
        destination=cidr("FRA_DST", message["dst_len"]),
        iif=message.get_attr("FRA_IIFNAME"),
        oif=message.get_attr("FRA_OIFNAME"),
        fwmark=message.get_attr("FRA_FWMARK"),
        version=4 if message["family"] == socket.AF_INET else 6,
    )


def lifelines(ipr: IPRoute, names: Mapping[int, str], address: str | None) -> dict[str, str]:
    """Return why the host needs an interface, by name: it carries the default route, or is the way to an address.

    `names` are those of interfaces by number.
    """
    reasons = {}
    if address is not None:
        with contextlib.suppress(NetlinkError):  # unreachable
            for message in ipr.route("get", dst=address):
                reasons[names.get(message.get_attr("RTA_OIF"), "")] = f"is the way to the API server {address}"
    only = only_ways(_default_routes(ipr, names), lambda name: frozenset({name}))
    return reasons | dict.fromkeys(only, "carries the host's default route")


def _default_routes(ipr: IPRoute, names: Mapping[int, str]) -> Iterator[DefaultRoute]:
    for message in _messages(ipr):
        if message["dst_len"] == 0 and message["type"] == RTN_UNICAST and message["table"] == RT_TABLE_MAIN:
            family = 4 if message["family"] == socket.AF_INET else 6
            advertised = message["proto"] == RTPROT_RA
            for index, _ in _ways(message):
                if index in names:
                    yield DefaultRoute(names[index], family, message.get_attr("RTA_PRIORITY") or 0, advertised)


def _messages(ipr: IPRoute) -> Iterator[Any]:
    for family in (socket.AF_INET, socket.AF_INET6):
        with _translated("list routes"):
            yield from list(ipr.route("dump", family=family))


def _routes(message: Any, ifindex: int | None) -> Iterator[Route]:
    """Yield a route for each of its ways, through one interface or through any."""
    wide = "0.0.0.0" if message["family"] == socket.AF_INET else "::"  # noqa: S104 -- the default route's destination
    destination = f"{message.get_attr('RTA_DST') or wide}/{message['dst_len']}"
    table = message.get_attr("RTA_TABLE")
    for index, way in _ways(message):
        if ifindex in (None, index):
            yield Route(
                destination,
                way.get_attr("RTA_GATEWAY"),
                priority=message.get_attr("RTA_PRIORITY"),
                table=table if table != RT_TABLE_MAIN else None,
                source=message.get_attr("RTA_PREFSRC"),
                onlink=bool(way["flags"] & RTNH_F_ONLINK),
                protocol=message["proto"],
                by_itself=message["proto"] in (RTPROT_KERNEL, RTPROT_RA),
            )


def _ways(message: Any) -> Iterator[tuple[int, Any]]:
    """Yield the index of each interface that a route goes through, with what has its gateway."""
    ways = message.get_attr("RTA_MULTIPATH") or ()
    for index, way in [(message.get_attr("RTA_OIF"), message), *((way["oif"], way) for way in ways)]:
        if index is not None:
            yield index, way


@contextmanager
def _translated(action: str) -> Iterator[None]:
    try:
        with translated(action):
            yield
    except NetlinkError as error:
        raise NetlinkFailed(action, error.code, os.strerror(error.code)) from error
