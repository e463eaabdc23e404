"""What a network's routing keys make of an interface in a pod, and what CHECK finds otherwise.

With `routing: source` an interface has a table of its own, with its subnets, its routes and its gateway, and for each
of its addresses a rule that sends there what comes from it. So what is asked on an interface is answered on it, and
RDMA-CM finds the way back through the interface that a request came by. The main table has the same routes, but for
default ones: the pod's own stays the cluster network's.

Linux answers ARP for each of a pod's addresses on any of its interfaces, unless it is told not to. So where several
interfaces of ours lie in one subnet, or `source` asks for it, each answers for its own addresses and asks from them
(arp_ignore, arp_announce), and takes packets whose way back is another one (rp_filter: loose). IPv6 is so by itself.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address, ip_interface, ip_network
from typing import Any

from agent.config.routing import NO_ROUTING, SOURCE_PRIORITY, Routing
from agent.errors import HardwareError
from agent.hardware.host import LinkPolicy, Neighbour, Route, Rule
from agent.hardware.netlink.links import Netlink
from agent.model.allocation import Attachment
from cni.call import ROUTING
from cni.result import RT_SCOPE_LINK, Leases, ips_of

KEPT_APART: Mapping[str, int] = {"arp_ignore": 1, "arp_announce": 2, "rp_filter": 2}
_RESERVED_TABLES = 256
_ALIKE = ("mtu", "advmss", "priority", "table", "scope")
"""What a route's keys and the kernel's value call the same."""
_TOLD = ("dst", "gw", *_ALIKE)
_EVERYTHING = {4: "0.0.0.0/0", 6: "::/0"}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placed:
    """An interface of ours in a pod: its name there, what was leased for it, and what its network says."""

    ifname: str
    leases: Leases
    routing: Routing = NO_ROUTING

    @classmethod
    def of(cls, row: Attachment, leases: Leases | None = None) -> Placed:
        """Make it of a row, and of what was leased, or else of what the ADD answered."""
        found = leases or Leases(ips_of(row.result or {}, row.ifname) or ())
        return cls(row.ifname, found, Routing.from_document(row.request.get(ROUTING) or {}))

    def is_beside(self, other: Placed) -> bool:
        """Return whether both have addresses in one subnet of IPv4."""
        theirs = [ip_interface(address).network for address in other.leases.addresses]
        networks = (ip_interface(address).network for address in self.leases.addresses)
        return any(one.version == two.version == 4 and one.overlaps(two) for one in networks for two in theirs)


def table_of(ifname: str) -> int:
    """Number an interface's own table: by its name, so it is the same at each ADD, and another for each name.

    Names of one length that differ in at most four letters in a row never have the same number; others do by a
    chance of 1 in 2**32.
    """
    number = zlib.crc32(ifname.encode())
    return number if number >= _RESERVED_TABLES else number + _RESERVED_TABLES


def configure(links: Netlink, netns: int, placed: Placed, others: Sequence[Placed]) -> Leases:
    """Give an interface in a pod its addresses and all that its network says. `others` of ours are there already.

    Returns what the answer to the ADD is to tell. Raises HardwareError.
    """
    beside = [other for other in others if placed.is_beside(other)]
    for other in beside:
        if other.routing.by_source or any(other.is_beside(third) for third in others if third is not other):
            continue  # it has been kept apart before
        settings = {key: value for key, value in KEPT_APART.items() if key not in other.routing.sysctls}
        try:
            links.configure(other.ifname, netns, (), (), LinkPolicy(settings=settings))
        except HardwareError as error:  # the pod has renamed it, say: no reason to refuse it another
            log.warning("%s is left as it is, though %s comes beside it: %s", other.ifname, placed.ifname, error)
    routes, policy = planned(placed, is_crowded=bool(beside))
    links.configure(placed.ifname, netns, placed.leases.addresses, routes, policy)
    told = ({key: route[key] for key in _TOLD if key in route} for route in placed.routing.routes)
    return replace(placed.leases, routes=(*placed.leases.routes, *told))


def planned(placed: Placed, *, is_crowded: bool) -> tuple[tuple[Route, ...], LinkPolicy]:
    """Say which routes an interface is to have, and what else beside its addresses. Pure."""
    routing, leases = placed.routing, placed.leases
    gateways = _gateways(placed)
    routes = [*leases.kernel_routes(), *(_route(said, gateways) for said in routing.routes)]
    rules: list[Rule] = []
    table = table_of(placed.ifname) if routing.by_source else None
    if table is not None:
        own = [*_on_link(leases), *_defaults(leases, gateways, routes), *(r for r in routes if r.table is None)]
        routes = [route for route in routes if route.table is not None or not _is_default(route)]
        routes += [replace(route, table=table) for route in own]
        addresses = (ip_interface(address).ip for address in leases.addresses)
        rules += (Rule(table, SOURCE_PRIORITY, str(ip_network(ip)), version=ip.version) for ip in addresses)
    rules += (rule for said in routing.rules for rule in _rules(said, table))
    neighbours = tuple(Neighbour(str(ip_address(one["ip"])), one["mac"]) for one in routing.neighbours)
    settings = _settings(placed, is_crowded=is_crowded)
    return tuple(dict.fromkeys(routes)), LinkPolicy(tuple(rules), neighbours, settings, table)


def differences(
    links: Netlink, netns: int, row: Attachment, rows: Sequence[Attachment], answer: Mapping[str, Any]
) -> list[str]:
    """Return what of an attached interface is not as ADD made it. `rows` are all that are in the pod.

    Which route came with which interface the answer does not say, so those of the IPAM plugin are compared elsewhere.
    """
    if ROUTING not in row.request:  # of an earlier version
        return []
    placed, name = Placed.of(row, Leases(ips_of(answer, row.ifname) or ())), row.ifname
    is_crowded = any(placed.is_beside(Placed.of(other)) for other in rows if other.ifname != name)
    if placed.routing == NO_ROUTING and not is_crowded:
        return []
    routes, wanted = planned(placed, is_crowded=is_crowded)
    has_default = {":" in route["dst"] for route in answer.get("routes") or () if route["dst"].endswith("/0")}
    found, there = links.policy(name, netns), {_place(route) for route in links.routes(netns, name)}
    missing = [
        f"the route to {route.destination}{f' via {route.gateway}' if route.gateway else ''} by {name}"
        f"{f' in table {route.table}' if route.table is not None else ''}"
        for route in routes
        if _place(route) not in there and not (_is_default(route) and (":" in route.destination) in has_default)
    ]
    missing += [
        f"the rule for table {rule.table} at {rule.priority}" for rule in wanted.rules if rule not in found.rules
    ]
    missing += [f"the neighbour {one.address} of {name}" for one in wanted.neighbours if one not in found.neighbours]
    told = [f"{what} is missing" for what in missing]
    for key, value in wanted.settings.items():
        if (is_now := found.settings.get(key, value)) != value:
            told.append(f"{name} has {key} {is_now}, not {value}")
    return told


# ------------------------------------------------------------------------------------------------------------ steps


def _settings(placed: Placed, *, is_crowded: bool) -> Mapping[str, int]:
    usual = KEPT_APART if is_crowded or placed.routing.by_source else {}
    return {**usual, **placed.routing.sysctls}


def _gateways(placed: Placed) -> Mapping[int, str]:
    """Return the gateway of each family: what the network says, or else the first that came with an address."""
    said = placed.routing.gateways
    if said is None:
        said = tuple(ip["gateway"] for ip in reversed(placed.leases.ips) if ip.get("gateway"))
    return {ip_address(gateway).version: gateway for gateway in said}


def _route(said: Mapping[str, Any], gateways: Mapping[int, str]) -> Route:
    """Make a configured route. One without a gateway takes the usual one, but for those of a link's scope."""
    gateway = said.get("gw")
    if gateway is None and said.get("scope", 0) < RT_SCOPE_LINK:
        gateway = gateways.get(ip_network(said["dst"]).version)
    more = {key: said[key] for key in _ALIKE if key in said}
    return Route(said["dst"], gateway, source=said.get("src"), onlink=said.get("onlink", False), **more)


def _on_link(leases: Leases) -> Iterator[Route]:
    """List the subnets that an interface's addresses lie in: in the main table the kernel makes these routes."""
    for one in map(ip_interface, leases.addresses):
        if one.network.prefixlen < one.max_prefixlen:
            yield Route(str(one.network), None, source=str(one.ip))


def _defaults(leases: Leases, gateways: Mapping[int, str], routes: Sequence[Route]) -> Iterator[Route]:
    """List the default routes that gateways make, where no other is wanted.

    A gateway outside of the subnets is a neighbour all the same, as of clouds that give addresses without a subnet.
    """
    for version in {ip_interface(address).version for address in leases.addresses} & gateways.keys():
        mine = (route for route in routes if route.table is None and (":" in route.destination) == (version == 6))
        if not any(map(_is_default, mine)):
            gateway = ip_address(gateways[version])
            near = any(gateway in ip_interface(address).network for address in leases.addresses)
            yield Route(_EVERYTHING[version], str(gateway), onlink=not (near or gateway.is_link_local))


def _is_default(route: Route) -> bool:
    return ip_network(route.destination, strict=False).prefixlen == 0


def _rules(said: Mapping[str, Any], table: int | None) -> Iterator[Rule]:
    """Make the rule of one family; or of both, where it names no address."""
    networks = [str(ip_network(said[key])) if key in said else None for key in ("from", "to")]
    versions = {ip_network(network).version for network in networks if network is not None} or {4, 6}
    of_table = said.get("table", table)
    assert of_table is not None  # the reader sees to it
    source, destination = networks
    for version in sorted(versions):
        marks = {key: said.get(key) for key in ("iif", "oif", "fwmark")}
        yield Rule(of_table, said["priority"], source, destination, version=version, **marks)


def _place(route: Route) -> tuple[str, str | None, int | None]:
    gateway = str(ip_address(route.gateway)) if route.gateway else None
    return str(ip_network(route.destination, strict=False)), gateway, route.table
