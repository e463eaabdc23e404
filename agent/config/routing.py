"""Which ways a pod's packets take, and which settings its interfaces have there: keys of a network → a value.

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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address, ip_network
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator

from agent.config.section import FLAG, JsonSection, Refusal, keys_of, must_be, refuse, shown, that, value, whole, word
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


def _said(entry: JsonSection) -> dict[str, Any]:
    """Return what is said in an entry, as JSON has it."""
    found = ((key, getattr(entry, name)) for key, name in keys_of(type(entry)).items())
    return {key: value for key, value in found if value is not None}


def _version(text: Any) -> int | None:
    """Return the family of an address; None for what is none. (`ipaddress` takes numbers and zones, too.)"""
    try:
        return ip_address(text).version if isinstance(text, str) and "%" not in text else None
    except ValueError:
        return None


def _network_version(text: str) -> int | None:
    """Return the family of a network; None for what is none, or has bits of a host."""
    try:
        return ip_network(text).version if "/" in text and "%" not in text else None
    except ValueError:
        return None


def _rule_version(text: str) -> int | None:
    return _network_version(text) or _version(text)


_ROUTE_TO, _ADDRESS = "a network such as 10.0.0.0/8", "an IP address"
_MAC_WANTED = "a MAC address such as 02:00:00:00:00:01"
_WORDS = whole(0, _WORD)
_TABLE = whole(1, _WORD)
_PACKETS = that("a network or an address", _rule_version)
_NAME = that("an interface name", _IFNAME.fullmatch)


def _own_table(table: int | None) -> Iterator[Refusal]:
    if table == LOCAL_TABLE:
        yield Refusal(("table",), f"must not be {LOCAL_TABLE}, which is the kernel's own")


@dataclass(frozen=True, slots=True)
class _Route(JsonSection):
    dst: Annotated[str | None, that(_ROUTE_TO, _network_version)] = None
    gw: Annotated[str | None, that("an address of dst's family", _version)] = None
    src: Annotated[str | None, that("an address of dst's family", _version)] = None
    priority: Annotated[int | None, _WORDS] = None
    advmss: Annotated[int | None, _WORDS] = None
    mtu: Annotated[int | None, whole(68, 65535)] = None
    scope: Annotated[int | None, whole(0, 254)] = None
    table: Annotated[int | None, _TABLE] = None
    onlink: Annotated[bool | None, FLAG] = None

    def contradictions(self) -> Iterator[Refusal]:
        if self.dst is None:
            yield Refusal(("dst",), f"is missing: it must be {_ROUTE_TO}")
            return
        for key in ("gw", "src"):
            address = getattr(self, key)
            if address is not None and _version(address) != _network_version(self.dst):
                yield Refusal((key,), f"must be an address of dst's family, is {shown(address)}")
        if self.onlink and self.gw is None:
            yield Refusal(("onlink",), "is about a gateway: say gw, too")
        yield from _own_table(self.table)


@dataclass(frozen=True, slots=True)
class _Rule(JsonSection):
    source: Annotated[str | None, _PACKETS, Field(alias="from")] = None
    to: Annotated[str | None, _PACKETS] = None
    iif: Annotated[str | None, _NAME] = None
    oif: Annotated[str | None, _NAME] = None
    fwmark: Annotated[int | None, whole(1, _WORD)] = None
    table: Annotated[int | None, _TABLE] = None
    priority: Annotated[int | None, whole(1, HIGHEST_PRIORITY)] = None

    def contradictions(self) -> Iterator[Refusal]:
        if self.source is not None and self.to is not None and _rule_version(self.source) != _rule_version(self.to):
            yield Refusal(("to",), f"must be of from's family, is {shown(self.to)}")
        if not (self.source or self.to or self.iif or self.oif or self.fwmark):
            yield Refusal((), "must say which packets it is about: from, to, iif, oif or fwmark")
        yield from _own_table(self.table)


@dataclass(frozen=True, slots=True)
class _Neighbour(JsonSection):
    ip: Annotated[str | None, that(_ADDRESS, _version)] = None
    mac: Annotated[str | None, that(_MAC_WANTED, _MAC.fullmatch)] = None

    def contradictions(self) -> Iterator[Refusal]:
        for key, want in (("ip", _ADDRESS), ("mac", _MAC_WANTED)):
            if getattr(self, key) is None:
                yield Refusal((key,), f"is missing: it must be {want}")


def _entries(most: int) -> BeforeValidator:
    def check(given: Any) -> Any:
        if not isinstance(given, list) or len(given) > most or not all(isinstance(each, dict) for each in given):
            raise must_be(f"a list of at most {most} objects")
        return given

    return BeforeValidator(check)


def _gateways(given: Any) -> tuple[str, ...] | None:
    if given == "":
        return None
    if given == NO_GATEWAY:
        return ()
    found = tuple(given) if isinstance(given, list) else (given,)
    versions = [_version(text) for text in found]
    if not 0 < len(versions) <= 2 or None in versions or len(set(versions)) < len(versions):
        raise ValueError
    return found


def _sysctls(given: Any) -> dict[str, int]:
    if not isinstance(given, dict):
        raise must_be("an object")
    wrong: list[Refusal] = []
    for name, number in given.items():
        allowed = SYSCTLS.get(name)
        if allowed is None:
            wrong.append(Refusal((name,), unknown(name, SYSCTLS, "setting")))
        elif type(number) is not int or number not in allowed:
            wrong.append(Refusal((name,), f"must be {' or '.join(map(str, allowed))}, is {shown(number)}"))
    refuse(wrong)
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingKeys(JsonSection):
    """The keys of a network about routes, rules, neighbours and settings."""

    routing: Annotated[str | None, word(SOURCE, MAIN)] = None
    gateway: Annotated[
        tuple[str, ...] | None, value(f"an IP address, a list of one for each family, or {NO_GATEWAY}", _gateways, {})
    ] = None
    routes: Annotated[tuple[_Route, ...], _entries(MAX_ROUTES)] = ()
    rules: Annotated[tuple[_Rule, ...], _entries(MAX_RULES)] = ()
    neighbours: Annotated[tuple[_Neighbour, ...], _entries(MAX_NEIGHBOURS)] = ()
    sysctls: Annotated[Mapping[str, int] | None, PlainValidator(_sysctls)] = None

    def routing_value(self) -> Routing:
        return Routing(
            self.routing or MAIN,
            self.gateway,
            tuple(map(_said, self.routes)),
            tuple({**_said(rule), "priority": rule.priority or RULE_PRIORITY} for rule in self.rules),
            tuple({"ip": one.ip or "", "mac": (one.mac or "").lower()} for one in self.neighbours),
            self.sysctls or {},
        )

    def of_routing(self, *, has_addresses: bool) -> Iterator[Refusal]:
        """List routing keys that do not go together."""
        is_source = self.routing == SOURCE
        if is_source and not has_addresses:
            yield Refusal(("routing",), "source is about addresses, and none are given: say ipam, too")
        if self.gateway is not None and not is_source and all(r.gw or r.scope for r in self.routes):
            text = "has no effect without routing: source, or a route that lacks gw: leave it out"
            yield Refusal(("gateway",), text)
        for i, rule in enumerate(self.rules):
            if rule.table is None and not is_source:
                text = "is missing: only with routing: source has an interface its own"
                yield Refusal(("rules", i, "table"), text)
