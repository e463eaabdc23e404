"""What an interface has besides the link: addresses, routes, rules, neighbours and settings, given and listed.

They are given in one go, encoded here, since a pod's start waits for that. Settings of IPv4 go into a request about the
interface. Those of IPv6 are files only, which a container sees read-only in its own /proc/sys; they follow the network
namespace of the thread that opens them. Lists come from pyroute2, through a socket that the caller opened where they
are; it is imported when the first list is asked for.
Layout: include/uapi/linux/if_addr.h, rtnetlink.h, fib_rules.h, neighbour.h, ip.h and ipv6.h.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware import netns as namespaces
from agent.hardware.host import Link, LinkPolicy, Neighbour, Route, Rule
from agent.hardware.netlink.rtnetlink import (
    LINK,
    NLA_F_NESTED,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    RTM_SETLINK,
    WORD,
    LinkMessage,
    NetlinkSocket,
    attribute,
    attribute_table,
    failed,
    text_attribute,
    translated,
    word,
)

if TYPE_CHECKING:
    from pyroute2 import IPRoute

RTM_NEWADDR, RTM_NEWROUTE, RTM_NEWNEIGH, RTM_NEWRULE, RTM_DELRULE = 20, 24, 28, 32, 33
RT_SCOPE_UNIVERSE, RT_SCOPE_LINK = 0, 253
RT_TABLE_COMPAT, RT_TABLE_MAIN, RT_TABLE_LOCAL = 252, 254, 255
RTPROT_KERNEL, RTPROT_STATIC, RTPROT_RA = 2, 4, 9
RTN_UNICAST = 1
RTNH_F_ONLINK = 0x4
IFA_F_NODAD = 0x02
_IFA_ADDRESS, _IFA_LOCAL, _IFA_BROADCAST = 1, 2, 4
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_PREFSRC, _RTA_METRICS, _RTA_TABLE, _RTA_VIA = (
    *(1, 4, 5, 6, 7, 8),
    *(15, 18),
)
_RTAX_MTU, _RTAX_ADVMSS = 2, 8

_IFADDRMSG = struct.Struct("=BBBBI")
_RTMSG = struct.Struct("=BBBBBBBBI")
_FAMILY = struct.Struct("=H")
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_NEIGHBOUR = struct.Struct("=BxxxiHBB")
NUD_PERMANENT = 0x80
_NDA_DST, _NDA_LLADDR = 1, 2
_FRA_DST, _FRA_SRC, _FRA_IIFNAME, _FRA_PRIORITY, _FRA_FWMARK, _FRA_TABLE, _FRA_OIFNAME = 1, 2, 3, 6, 10, 15, 17
FR_ACT_TO_TBL = 1
_IFLA_AF_SPEC = 26
_IFLA_INET_CONF, _IFLA_INET6_CONF = 1, 2
IPV4_SETTINGS: Mapping[str, int] = MappingProxyType(
    {
        "send_redirects": 6,
        "rp_filter": 8,
        "arp_filter": 13,
        "arp_announce": 18,
        "arp_ignore": 19,
        "arp_accept": 21,
        "arp_notify": 22,
        "accept_local": 23,
    }
)
"""IPV4_DEVCONF_*: by these a request may set them."""
IPV6_SETTINGS: Mapping[str, int] = MappingProxyType({"accept_ra": 3, "autoconf": 5, "disable_ipv6": 26})
"""DEVCONF_*: by these they are told. No request sets them."""
FILES = (Path("/host/proc/sys/net"), Path("/proc/sys/net"))
"""Where settings of IPv6 are written: the first that is there. The former is the host's, which the chart may mount. It
must be this folder: those below it are of the namespace in which they were mounted."""
_IPV6_OFF = {errno.EACCES: "IPv6 is off there (sysctl net.ipv6.conf.*.disable_ipv6): turn it on, or lease IPv4 only"}
"""No other address is refused so (net/ipv6/addrconf.c, addrconf_add_dev)."""
_ALREADY = (errno.EEXIST,)
MAX_AT_ONCE = 64
"""Requests in one message to the kernel."""


def configure(
    links: NetlinkSocket,
    ifname: str,
    netns: int | None,
    addresses: Sequence[str],
    routes: Sequence[Route],
    policy: LinkPolicy,
) -> None:
    """Give an interface all of that. What is there already is success. Raises HardwareError.

    `links` is a socket in its namespace, `netns` that namespace's descriptor; None for the host's.
    """
    found = links.find(ifname)
    if found is None:
        raise HardwareError(f"interface {ifname} is not in {'the host' if netns is None else 'the pod'}'s namespace")
    of_ipv6 = {name: value for name, value in policy.settings.items() if name in IPV6_SETTINGS}
    if of_ipv6:
        write = partial(write_settings, FILES, ifname, of_ipv6)
        write() if netns is None else namespaces.run_in(netns, write)
    if policy.table is not None:
        removing = [(RTM_DELRULE, 0, encode_rule_removal(policy.table, version)) for version in (4, 6)]
        with translated(f"remove the rules for table {policy.table}"):
            while removing:  # each request removes one, until it is refused
                refused = links.ask_all(removing)
                removing = [one for place, one in enumerate(removing) if place not in refused]
    _ask(links, [*_requests(found.ifindex, ifname, addresses, routes, policy)])


class _Asked(NamedTuple):
    """A request, what it is for, and the errors that say that it is so already."""

    action: str
    kind: int
    flags: int
    body: bytes
    fine: tuple[int, ...] = ()


def _ask(links: NetlinkSocket, asked: Sequence[_Asked]) -> None:
    """Ask for all of that. Raises NetlinkFailed for what is refused."""
    for start in range(0, len(asked), MAX_AT_ONCE):
        some = asked[start : start + MAX_AT_ONCE]
        with translated(some[0].action):
            refused = links.ask_all([(one.kind, one.flags, one.body) for one in some])
        for place, number in sorted(refused.items()):
            if number not in some[place].fine:
                raise failed(some[place].action, OSError(number, os.strerror(number)), _IPV6_OFF)


def _requests(
    ifindex: int, ifname: str, addresses: Sequence[str], routes: Sequence[Route], policy: LinkPolicy
) -> Iterator[_Asked]:
    """List what to ask for, each thing before what builds upon it."""
    if of_ipv4 := {name: value for name, value in policy.settings.items() if name in IPV4_SETTINGS}:
        yield _Asked(f"set {', '.join(of_ipv4)} of {ifname}", RTM_SETLINK, 0, encode_settings(ifindex, of_ipv4))
    for cidr in addresses:
        body = encode_address(ifindex, cidr)
        yield _Asked(f"add address {cidr} to {ifname}", RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, body)
    for near in policy.neighbours:
        action, body = f"add neighbour {near.address} at {near.mac} to {ifname}", encode_neighbour(ifindex, near)
        yield _Asked(action, RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, body)
    for route in routes:
        # Before those to the same destination through other interfaces, not in their place: what is bound to one of
        # these, as RDMA-CM is by its address, needs its own. As the library of the CNI plugins does.
        table = f" in table {route.table}" if route.table is not None else ""
        action = f"add route {route.destination} via {route.gateway or ifname}{table}"
        yield _Asked(action, RTM_NEWROUTE, NLM_F_CREATE, encode_route(ifindex, route), _ALREADY)
    for rule in policy.rules:
        action, body = f"add a rule for table {rule.table}", encode_rule(rule)
        yield _Asked(action, RTM_NEWRULE, NLM_F_CREATE | NLM_F_EXCL, body, _ALREADY)


def write_settings(folders: Sequence[Path], ifname: str, settings: Mapping[str, int]) -> None:
    """Write settings of IPv6, in the calling thread's namespace. Raises HardwareError."""
    folder = next((one for one in folders if one.is_dir()), folders[-1]) / "ipv6/conf" / ifname
    if not folder.parent.is_dir():  # the kernel has no IPv6: nothing to accept, and nothing to turn off
        return
    for name, value in settings.items():
        try:
            (folder / name).write_text(f"{value}\n")
        except OSError as error:
            raise HardwareError(
                f"cannot set {name} of {ifname} to {value}: {error.strerror}: settings of IPv6 are files, which a"
                " container sees read-only; mount the host's (writableSysctls of the chart, the component sysctls), or"
                f" leave {name} out of the network's sysctls"
            ) from error


def encode_address(ifindex: int, cidr: str) -> bytes:
    """Make the body of RTM_NEWADDR that gives an interface an address. Raises ValueError for what is none."""
    wanted = ipaddress.ip_interface(cidr)
    packed, length = wanted.ip.packed, wanted.network.prefixlen
    # The pod may use an IPv6 address at once: IPAM says that it is unique.
    flags = IFA_F_NODAD if wanted.version == 6 else 0
    body = _IFADDRMSG.pack(_FAMILIES[wanted.version], length, flags, RT_SCOPE_UNIVERSE, ifindex)
    body += attribute(_IFA_LOCAL, packed) + attribute(_IFA_ADDRESS, packed)
    if wanted.version == 4 and length < 31:
        body += attribute(_IFA_BROADCAST, wanted.network.broadcast_address.packed)
    return body


def encode_route(ifindex: int, wanted: Route) -> bytes:
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
        *(_short(table), RTPROT_STATIC if wanted.protocol is None else wanted.protocol),
        *(scope, RTN_UNICAST, RTNH_F_ONLINK if wanted.onlink else 0),
    )
    body += word(_RTA_TABLE, table) + word(_RTA_OIF, ifindex)
    if network.prefixlen:
        body += attribute(_RTA_DST, network.network_address.packed)
    if gateway is not None and gateway.version == network.version:
        body += attribute(_RTA_GATEWAY, gateway.packed)
    elif gateway is not None:
        body += attribute(_RTA_VIA, _FAMILY.pack(_FAMILIES[gateway.version]) + gateway.packed)
    if wanted.priority is not None:
        body += word(_RTA_PRIORITY, wanted.priority)
    if wanted.source is not None:
        body += attribute(_RTA_PREFSRC, ipaddress.ip_address(wanted.source).packed)
    metrics = ((_RTAX_MTU, wanted.mtu), (_RTAX_ADVMSS, wanted.advmss))
    if found := b"".join(word(kind, value) for kind, value in metrics if value is not None):
        body += attribute(_RTA_METRICS, found)
    return body


def encode_rule(wanted: Rule) -> bytes:
    """Make the body of RTM_NEWRULE."""
    networks = [ipaddress.ip_network(text) if text else None for text in (wanted.destination, wanted.source)]
    lengths = [network.prefixlen if network is not None else 0 for network in networks]
    # struct fib_rule_hdr has the layout of struct rtmsg.
    body = _RTMSG.pack(_FAMILIES[wanted.version], *lengths, 0, _short(wanted.table), 0, 0, FR_ACT_TO_TBL, 0)
    for kind, network in zip((_FRA_DST, _FRA_SRC), networks, strict=True):
        if network is not None:
            body += attribute(kind, network.network_address.packed)
    for kind, name in ((_FRA_IIFNAME, wanted.iif), (_FRA_OIFNAME, wanted.oif)):
        if name is not None:
            body += text_attribute(kind, name)
    if wanted.fwmark is not None:
        body += word(_FRA_FWMARK, wanted.fwmark)
    return body + word(_FRA_PRIORITY, wanted.priority) + word(_FRA_TABLE, wanted.table)


def encode_rule_removal(table: int, version: int) -> bytes:
    """Make the body of RTM_DELRULE that removes a rule for a table, whichever of one family."""
    return _RTMSG.pack(_FAMILIES[version], 0, 0, 0, _short(table), 0, 0, 0, 0) + word(_FRA_TABLE, table)


def encode_neighbour(ifindex: int, wanted: Neighbour) -> bytes:
    """Make the body of RTM_NEWNEIGH for a neighbour that stays."""
    address = ipaddress.ip_address(wanted.address)
    body = _NEIGHBOUR.pack(_FAMILIES[address.version], ifindex, NUD_PERMANENT, 0, 0)
    return (
        body + attribute(_NDA_DST, address.packed) + attribute(_NDA_LLADDR, bytes.fromhex(wanted.mac.replace(":", "")))
    )


def encode_settings(ifindex: int, wanted: Mapping[str, int]) -> bytes:
    """Make the body of RTM_SETLINK for some of `IPV4_SETTINGS` (net/ipv4/devinet.c, inet_set_link_af)."""
    values = b"".join(word(IPV4_SETTINGS[name], value) for name, value in wanted.items())
    nested = attribute(socket.AF_INET | NLA_F_NESTED, attribute(_IFLA_INET_CONF | NLA_F_NESTED, values))
    return LINK.pack(socket.AF_UNSPEC, 0, ifindex, 0, 0) + attribute(_IFLA_AF_SPEC | NLA_F_NESTED, nested)


def read_settings(link: Mapping[int, bytes]) -> dict[str, int]:
    """Read the settings of an interface from its attributes. Of a family that is off there are none."""
    families = attribute_table(link.get(_IFLA_AF_SPEC, b""))
    found = {}
    for family, kind, names, first in (
        (socket.AF_INET, _IFLA_INET_CONF, IPV4_SETTINGS, 1),
        (socket.AF_INET6, _IFLA_INET6_CONF, IPV6_SETTINGS, 0),
    ):
        values = attribute_table(families.get(family, b"")).get(kind, b"")
        for name, number in names.items():
            at = (number - first) * WORD.size
            if at + WORD.size <= len(values):
                found[name] = WORD.unpack_from(values, at)[0]
    return found


def _short(table: int) -> int:
    """Say a table in the header, where it has room for it."""
    return table if table < 256 else RT_TABLE_COMPAT


def read_addresses(ipr: IPRoute, link: Link) -> tuple[str, ...]:
    """List an interface's global addresses as CIDR."""
    with _translated(f"list addresses of {link.name}"):
        messages = list(ipr.addr("dump", index=link.ifindex, scope=RT_SCOPE_UNIVERSE))
    return tuple(f"{m.get_attr('IFA_ADDRESS')}/{m['prefixlen']}" for m in messages)


def read_routes(ipr: IPRoute, link: Link | None) -> tuple[Route, ...]:
    """List the routes, of an interface or of all, but those to local addresses."""
    found: list[Route] = []
    for message in _listed_routes(ipr):
        if message["type"] == RTN_UNICAST and message.get_attr("RTA_TABLE") != RT_TABLE_LOCAL:
            found += _read_routes(message, link.ifindex if link is not None else None)
    return tuple(found)


def read_policy(ipr: IPRoute, link: LinkMessage) -> LinkPolicy:
    """Read an interface's settings and lasting neighbours, and all rules that name a table."""
    with _translated("list rules and neighbours"):
        rules = [rule for family in (socket.AF_INET, socket.AF_INET6) for rule in ipr.rule("dump", family=family)]
        neighbours = list(ipr.neigh("dump", ifindex=link.ifindex))
    return LinkPolicy(
        tuple(_read_rule(message) for message in rules if message["action"] == FR_ACT_TO_TBL),
        tuple(
            Neighbour(one.get_attr("NDA_DST"), one.get_attr("NDA_LLADDR"))
            for one in neighbours
            if one["state"] & NUD_PERMANENT and one["ifindex"] == link.ifindex
        ),
        read_settings(link.attributes),
    )


def _read_rule(message: Any) -> Rule:
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


def _listed_routes(ipr: IPRoute) -> Iterator[Any]:
    for family in (socket.AF_INET, socket.AF_INET6):
        with _translated("list routes"):
            yield from list(ipr.route("dump", family=family))


def _read_routes(message: Any, ifindex: int | None) -> Iterator[Route]:
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
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with translated(action):
            yield
    except NetlinkError as error:
        raise NetlinkFailed(action, error.code, os.strerror(error.code)) from error
