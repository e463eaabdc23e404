"""rtnetlink requests for what a pod's interface gets (addresses, routes, rules, neighbours, settings). Pure.

Layout: include/uapi/linux/if_addr.h, rtnetlink.h, fib_rules.h, neighbour.h, ip.h
and ipv6.h. `addressing` lists what is there.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Mapping
from types import MappingProxyType

from agent.hardware.host import Neighbour, Route, Rule
from agent.hardware.netlink.codec import NLA_F_NESTED, WORD, attribute, attribute_table, word
from agent.hardware.netlink.link_messages import LINK

RTM_NEWADDR, RTM_NEWROUTE, RTM_NEWNEIGH, RTM_NEWRULE, RTM_DELRULE = 20, 24, 28, 32, 33
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
_RTAX_MTU, _RTAX_ADVMSS = 2, 8

_IFADDRMSG = struct.Struct("=BBBBI")
_RTMSG = struct.Struct("=BBBBBBBBI")
_FAMILY = struct.Struct("=H")
_WAY = struct.Struct("=HBBi")
"""struct rtnexthop: length, flags, hops, interface."""
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_NEIGHBOUR = struct.Struct("=BxxxiHBB")
_NUD_PERMANENT = 0x80
_NDA_DST, _NDA_LLADDR = 1, 2
_FRA_DST, _FRA_SRC, _FRA_IIFNAME, _FRA_PRIORITY, _FRA_FWMARK, _FRA_TABLE, _FRA_OIFNAME = 1, 2, 3, 6, 10, 15, 17
_FR_ACT_TO_TBL = 1
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


def address(ifindex: int, cidr: str) -> bytes:
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


def rule(wanted: Rule) -> bytes:
    """Make the body of RTM_NEWRULE."""
    networks = [ipaddress.ip_network(text) if text else None for text in (wanted.destination, wanted.source)]
    lengths = [network.prefixlen if network is not None else 0 for network in networks]
    # struct fib_rule_hdr has the layout of struct rtmsg.
    body = _RTMSG.pack(_FAMILIES[wanted.version], *lengths, 0, _short(wanted.table), 0, 0, _FR_ACT_TO_TBL, 0)
    for kind, network in zip((_FRA_DST, _FRA_SRC), networks, strict=True):
        if network is not None:
            body += attribute(kind, network.network_address.packed)
    for kind, name in ((_FRA_IIFNAME, wanted.iif), (_FRA_OIFNAME, wanted.oif)):
        if name is not None:
            body += attribute(kind, name.encode() + b"\0")
    if wanted.fwmark is not None:
        body += word(_FRA_FWMARK, wanted.fwmark)
    return body + word(_FRA_PRIORITY, wanted.priority) + word(_FRA_TABLE, wanted.table)


def rules_for(table: int, version: int) -> bytes:
    """Make the body of RTM_DELRULE that removes a rule for a table, whichever of one family."""
    return _RTMSG.pack(_FAMILIES[version], 0, 0, 0, _short(table), 0, 0, 0, 0) + word(_FRA_TABLE, table)


def neighbour(ifindex: int, wanted: Neighbour) -> bytes:
    """Make the body of RTM_NEWNEIGH for a neighbour that stays."""
    address = ipaddress.ip_address(wanted.address)
    body = _NEIGHBOUR.pack(_FAMILIES[address.version], ifindex, _NUD_PERMANENT, 0, 0)
    return (
        body + attribute(_NDA_DST, address.packed) + attribute(_NDA_LLADDR, bytes.fromhex(wanted.mac.replace(":", "")))
    )


def settings(ifindex: int, wanted: Mapping[str, int]) -> bytes:
    """Make the body of RTM_SETLINK for some of `IPV4_SETTINGS` (net/ipv4/devinet.c, inet_set_link_af)."""
    values = b"".join(word(IPV4_SETTINGS[name], value) for name, value in wanted.items())
    nested = attribute(socket.AF_INET | NLA_F_NESTED, attribute(_IFLA_INET_CONF | NLA_F_NESTED, values))
    return LINK.pack(socket.AF_UNSPEC, 0, ifindex, 0, 0) + attribute(_IFLA_AF_SPEC | NLA_F_NESTED, nested)


def told_settings(link: Mapping[int, bytes]) -> dict[str, int]:
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
