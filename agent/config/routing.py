"""Which ways a pod's packets take, and what its kernel is told of an interface there: keys of a network → a value.

    routing: source                  # what comes from an interface's address goes out by that interface
    gateway: 10.1.0.1                # of each interface's own table: one a family, or none; default: what IPAM answers
    routes: [{dst: 10.0.0.0/8, gw: 10.1.0.1}]
    rules: [{to: 10.9.0.0/16, table: 100}]
    neighbours: [{ip: 10.1.0.9, mac: "02:00:00:00:00:09"}]
    sysctls: {arp_ignore: 1, accept_ra: 0}

A route's keys are those of a CNI result (specification 1.1.0, "ADD Success"), with src and onlink beside them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address, ip_network
from types import MappingProxyType
from typing import Any

from agent.model.fields import Fields, is_list, is_object, join, shown
from agent.model.printable import unknown

KEYS = ("routing", "gateway", "routes", "rules", "neighbours", "sysctls")
SOURCE, MAIN = "source", "main"
NO_GATEWAY = "none"
MAX_ROUTES, MAX_RULES, MAX_NEIGHBOURS = 64, 64, 1024
RULE_PRIORITY, SOURCE_PRIORITY = 5_000, 10_000
"""Of a configured rule that says none; of those that `routing: source` makes."""
HIGHEST_PRIORITY = 32_765
"""The kernel's own rule for the main table comes next."""
LOCAL_TABLE = 255
SYSCTLS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("arp_filter", "arp_notify", "accept_local", "send_redirects"), (0, 1)),
        **dict.fromkeys(("arp_announce", "arp_accept", "rp_filter"), (0, 1, 2)),
        "arp_ignore": (0, 1, 2, 3, 8),
        **dict.fromkeys(("disable_ipv6", "autoconf"), (0, 1)),
        "accept_ra": (0, 1, 2),
    }
)
"""Settings of one interface, by their names in net.ipv4.conf (the first) and net.ipv6.conf (the last three), and what
each may be (Documentation/networking/ip-sysctl.rst)."""
_IFNAME = re.compile(r"(?!\.{1,2}$)[!-.0-9;-~]{1,15}")
_MAC = re.compile(r"[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}(?:(?::[0-9a-fA-F]{2}){14})?")
"""Of Ethernet, or of IP over InfiniBand."""
_WORD = 2**32 - 1
_TOLD_BY_RANGES = ("host-local", "whereabouts", "static")
_RANGES = ("subnet", "range", "address")
"""Keys of these IPAM plugins that tell what addresses they give, and `_OF_RANGES` the lists that have such keys."""
_OF_RANGES = ("ranges", "ipRanges", "addresses")


@dataclass(frozen=True, slots=True)
class Routing:
    """What a network says of them. All is as JSON holds it, and checked."""

    mode: str = MAIN
    """main; or source: a table for each interface, and rules that send there what has its addresses."""
    gateways: tuple[str, ...] | None = None
    """At most one of each family; None for those that the IPAM plugin answers."""
    routes: tuple[Mapping[str, Any], ...] = ()
    """Each with dst (CIDR), and gw, src, table, priority, mtu, advmss, scope, onlink where they are said."""
    rules: tuple[Mapping[str, Any], ...] = ()
    """Each with a priority, and from, to (CIDR), iif, oif, fwmark, table; without a table it is for the interface's."""
    neighbours: tuple[Mapping[str, str], ...] = ()
    """ip and mac."""
    sysctls: Mapping[str, int] = field(default_factory=dict)

    @property
    def by_source(self) -> bool:
        return self.mode == SOURCE

    def document(self) -> dict[str, Any]:
        """Return what the books keep of it."""
        return asdict(self) if self != NO_ROUTING else {}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Routing:
        """Read what `document` made."""
        made: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in document.items()
        }
        return cls(**made) if made else NO_ROUTING


NO_ROUTING = Routing()


def read_routing(fields: Fields, *, has_addresses: bool) -> Routing:
    """Read the keys of a network. Refuses what is wrong, with its path."""
    mode = fields.word("routing", (SOURCE, MAIN)) or MAIN
    routes = tuple(_each(fields, "routes", MAX_ROUTES, _route))
    gateways = _gateways(fields)
    if mode == SOURCE and not has_addresses:
        fields.refuse("routing: source is about addresses, and none are given: say ipam, too")
    if (
        gateways is not None
        and not fields.problems
        and mode != SOURCE
        and all("gw" in route or route.get("scope") for route in routes)
    ):
        fields.refuse("gateway has no effect without routing: source, or a route that lacks gw: leave it out")
    return Routing(
        mode,
        gateways,
        routes,
        tuple(_rule(entry, has_table=mode == SOURCE) for entry in _entries(fields, "rules", MAX_RULES)),
        tuple(_each(fields, "neighbours", MAX_NEIGHBOURS, _neighbour)),
        _sysctls(fields),
    )


def strange_gateways(routing: Routing, ipam: Mapping[str, Any] | None) -> Iterator[str]:
    """Tell of gateways of a family in which an IPAM plugin gives no address and that no route takes."""
    given = _families(ipam or {})
    taken = {_network_version(route["dst"]) for route in routing.routes if "gw" not in route}
    for gateway in routing.gateways or ():
        version = ip_address(gateway).version
        if given and version not in given | taken:
            yield (
                f"{gateway} is of IPv{version}, and ipam gives addresses of IPv{10 - version} alone, so it has no"
                f" effect: leave it out, or have ipam give addresses of IPv{version}, too"
            )


def _families(ipam: Mapping[str, Any]) -> set[int]:
    """Tell the families of the addresses that an IPAM plugin gives; empty for one that may give any."""
    kind = ipam.get("type")
    if kind == "dhcp":
        return {4}
    found: set[int] = set()
    waiting: list[Any] = [ipam] if kind in _TOLD_BY_RANGES else []
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            texts = [text for key in _RANGES if isinstance(text := value.get(key), str)]
            found.update(4 if ":" not in text else 6 for text in texts)
            waiting += [value[key] for key in _OF_RANGES if key in value]
        elif isinstance(value, list):
            waiting += value
    return found


def _gateways(fields: Fields) -> tuple[str, ...] | None:
    want = f"an IP address, a list of one for each family, or {NO_GATEWAY}"
    value = fields.take("gateway", _are_gateways, want)
    if not value:
        return None
    return () if value == NO_GATEWAY else tuple(value) if is_list(value) else (value,)


def _are_gateways(value: Any) -> bool:
    if value in ("", NO_GATEWAY):
        return True
    versions = [_version(text) for text in (value if is_list(value) else [value])]
    return 0 < len(versions) <= 2 and None not in versions and len(set(versions)) == len(versions)


def _route(entry: Fields) -> Mapping[str, Any]:
    to = _needed(entry, "dst", _network_version, "a network such as 10.0.0.0/8")
    found = {
        "dst": to,
        "gw": _of_family(entry, "gw", to),
        "src": _of_family(entry, "src", to),
        **{key: entry.whole(key, 0, _WORD) for key in ("priority", "advmss")},
        "mtu": entry.whole("mtu", 68, 65535),
        "scope": entry.whole("scope", 0, 254),
        "table": _table(entry),
        "onlink": entry.flag("onlink"),
    }
    if found["onlink"] and found["gw"] is None:
        entry.refuse(f"{join(entry.path, 'onlink')} is about a gateway: say gw, too")
    return found


def _rule(entry: Fields, *, has_table: bool) -> Mapping[str, Any]:
    source = entry.text("from", "", _rule_version, "a network or an address") or None
    to = entry.text("to", "", _rule_version, "a network or an address") or None
    if source is not None and to is not None and _rule_version(source) != _rule_version(to):
        entry.refuse(f"{join(entry.path, 'to')} must be of from's family, is {shown(to)}")
    found: dict[str, Any] = {
        "from": source,
        "to": to,
        **{key: entry.text(key, "", _IFNAME.fullmatch, "an interface name") or None for key in ("iif", "oif")},
        "fwmark": entry.whole("fwmark", 1, _WORD),
    }
    if not any(map(entry.document.get, found)):
        entry.refuse(f"{entry.path} must say which packets it is about: from, to, iif, oif or fwmark")
    table = _table(entry)
    if table is None and not has_table:
        entry.refuse(f"{join(entry.path, 'table')} is missing: only with routing: source has an interface its own")
    priority = entry.whole("priority", 1, HIGHEST_PRIORITY)
    _done(entry)
    return _said({**found, "table": table, "priority": RULE_PRIORITY if priority is None else priority})


def _neighbour(entry: Fields) -> Mapping[str, str]:
    mac = _needed(entry, "mac", _MAC.fullmatch, "a MAC address such as 02:00:00:00:00:01")
    return {"ip": _needed(entry, "ip", _version, "an IP address"), "mac": mac.lower()}


def _sysctls(fields: Fields) -> Mapping[str, int]:
    found = {}
    for name, value in (fields.mapping("sysctls") or {}).items():
        path, allowed = join("sysctls", name), SYSCTLS.get(name)
        if allowed is None:
            fields.refuse(f"{path} {unknown(name, SYSCTLS, 'setting')}")
        elif type(value) is not int or value not in allowed:
            fields.refuse(f"{path} must be {' or '.join(map(str, allowed))}, is {shown(value)}")
        else:
            found[name] = value
    return found


# ---------------------------------------------------------------------------------------------------------- entries


def _entries(fields: Fields, key: str, most: int) -> Iterator[Fields]:
    def are_entries(value: Any) -> bool:
        return is_list(value) and len(value) <= most and all(map(is_object, value))

    for index, item in enumerate(fields.take(key, are_entries, f"a list of at most {most} objects") or ()):
        yield Fields(item, join(join(fields.path, key), index), problems=fields.problems)


def _each(
    fields: Fields, key: str, most: int, read: Callable[[Fields], Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    for entry in _entries(fields, key, most):
        found = read(entry)
        _done(entry)
        yield _said(found)


def _done(entry: Fields) -> None:
    for key in entry.unasked():
        entry.refuse(f"{join(entry.path, key)} {unknown(key, entry.asked)}")


def _said(found: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in found.items() if value is not None}


def _needed(entry: Fields, key: str, ok: Callable[[str], object], want: str) -> str:
    value = entry.text(key, "", ok, want)
    if not value and entry.document.get(key) in (None, ""):
        entry.refuse(f"{join(entry.path, key)} is missing: it must be {want}")
    return value


def _of_family(entry: Fields, key: str, network: str) -> str | None:
    def fits(text: str) -> bool:
        return _version(text) is not None and (not network or _version(text) == ip_network(network).version)

    return entry.text(key, "", fits, "an address of dst's family") or None


def _table(entry: Fields) -> int | None:
    table = entry.whole("table", 1, _WORD)
    if table == LOCAL_TABLE:
        entry.refuse(f"{join(entry.path, 'table')} must not be {LOCAL_TABLE}, which is the kernel's own")
    return table


def _version(text: Any) -> int | None:
    """Tell the family of an address; None for what is none. (`ipaddress` takes numbers and zones, too.)"""
    try:
        return ip_address(text).version if isinstance(text, str) and "%" not in text else None
    except ValueError:
        return None


def _network_version(text: str) -> int | None:
    """Tell the family of a network; None for what is none, or has bits of a host."""
    try:
        return ip_network(text).version if "/" in text and "%" not in text else None
    except ValueError:
        return None


def _rule_version(text: str) -> int | None:
    return _network_version(text) or _version(text)
