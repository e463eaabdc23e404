"""CNI results: built, joined to a previous plugin's, checked where they came from elsewhere, told in another version.

What is checked is what Go's types take, since whoever reads our answer is written in Go.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.hardware.host import Route
from agent.model.fields import Check, Fields, is_list, is_object, is_text, join

RT_SCOPE_LINK = 253
_ROUTE_KEYS = ("mtu", "advmss", "priority", "table", "scope")
MAX_ITEMS = 1024
_SINCE_1_1 = {"interfaces": ("mtu", "socketPath", "pciID"), "routes": ("mtu", "advmss", "priority", "table", "scope")}
"""Keys that came with 1.1.0 (CNI specification, section "ADD Success")."""
_HIGHEST = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    mac: str
    """Empty where the device has none that is known."""
    mtu: int
    """0 where there is none."""
    sandbox: str
    device: str
    """PCI address; empty for an interface that is no PCI device's own."""


@dataclass(frozen=True, slots=True)
class Leases:
    """What an IPAM plugin answered."""

    ips: tuple[Mapping[str, Any], ...] = ()
    """Each with `address` (CIDR) and, at times, `gateway`."""
    routes: tuple[Mapping[str, Any], ...] = ()
    dns: Mapping[str, Any] | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(ip["address"] for ip in self.ips)

    def kernel_routes(self) -> tuple[Route, ...]:
        """The routes for the kernel; one without a gateway takes that of the first lease of its family.

        But for one of the scope of a link or of the host: the kernel refuses it with a gateway.
        """
        return tuple(self._kernel_route(route) for route in self.routes)

    def _kernel_route(self, route: Mapping[str, Any]) -> Route:
        gateway = route.get("gw") or None
        if gateway is None and (route.get("scope") or 0) < RT_SCOPE_LINK:
            family = ":" in route["dst"]
            fitting = (ip["gateway"] for ip in self.ips if ip.get("gateway") and (":" in ip["address"]) == family)
            gateway = next(fitting, None)
        more = {key: value for key in _ROUTE_KEYS if (value := route.get(key)) is not None}
        return Route(route["dst"], gateway, **more)


def ips_of(answer: Mapping[str, Any], ifname: str) -> tuple[Mapping[str, Any], ...] | None:
    """List what an answer gives to an interface, as `Leases.ips` has it. None if it has no such interface."""
    names = [entry.get("name") for entry in answer.get("interfaces") or ()]
    if ifname not in names:
        return None
    index = names.index(ifname)
    return tuple(ip for ip in answer.get("ips") or () if ip.get("interface") == index)


def build(version: str, previous: Mapping[str, Any] | None, made: Sequence[tuple[Interface, Leases]]) -> dict[str, Any]:
    """Make the result of an ADD: what came before, and our interfaces with their addresses after it."""
    result: dict[str, Any] = dict(previous or {})
    interfaces = list(result.get("interfaces") or [])
    ips = list(result.get("ips") or [])
    routes = list(result.get("routes") or [])
    dns = result.get("dns") or {}
    for interface, leases in made:
        entry: dict[str, Any] = {
            "name": interface.name,
            "mac": interface.mac,
            "mtu": interface.mtu,
            "sandbox": interface.sandbox,
            "pciID": interface.device,
        }
        interfaces.append({key: value for key, value in entry.items() if value})
        for ip in leases.ips:
            lease = {"interface": len(interfaces) - 1, "address": ip["address"]}
            if ip.get("gateway"):
                lease["gateway"] = ip["gateway"]
            ips.append(lease)
        routes.extend(dict(route) for route in leases.routes)
        dns = dns or leases.dns or {}
    result |= {"interfaces": interfaces, "dns": dict(dns)}
    if ips:
        result["ips"] = ips
    if routes:
        result["routes"] = routes
    return in_version(result, version)


def check_result(document: Any, path: str = "") -> None:
    """Raise RequestInvalid with the path of the first thing that no CNI result has."""
    fields = Fields(document, path, what="the result")
    fields.take("cniVersion", is_text, "a version")
    for key, check_item in (("interfaces", _interface), ("ips", _ip), ("routes", _route)):
        for index, item in enumerate(fields.take(key, _are_objects, "a list of objects") or ()):
            check_item(Fields(item, join(join(path, key), index)))
    dns = fields.inside("dns")
    for key in ("nameservers", "search", "options"):
        dns.take(key, _are_texts, "a list of texts")
    dns.take("domain", is_text, "a text")


def in_version(result: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Tell a checked result in another version: leave out what that does not know, add what it needs."""
    told = {**result, "cniVersion": version}
    if version.startswith("0.") or version == "1.0.0":
        for part, keys in _SINCE_1_1.items():
            if told.get(part):
                told[part] = [{k: v for k, v in item.items() if k not in keys} for item in told[part]]
    if told.get("ips"):
        told["ips"] = [ip_in_version(ip, version) for ip in told["ips"]]
    return told


def ip_in_version(ip: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Tell an entry of `ips`: before 1.0.0 each names its family."""
    told = {key: value for key, value in ip.items() if key != "version"}
    if version.startswith("0."):
        told["version"] = "6" if ":" in ip["address"] else "4"
    return told


def _interface(fields: Fields) -> None:
    for key in ("name", "mac", "sandbox", "socketPath", "pciID"):
        fields.take(key, is_text, "a text")
    fields.whole("mtu", 0, _HIGHEST)


def _ip(fields: Fields) -> None:
    _need(fields, "address", _is_cidr, "an address with its prefix length, such as 10.0.0.2/24")
    fields.take("gateway", _is_ip, "an IP address")
    fields.whole("interface", -1, MAX_ITEMS)
    fields.word("version", ("4", "6"))  # libcni writes "" for one that is not told


def _route(fields: Fields) -> None:
    _need(fields, "dst", _is_cidr, "a destination with its prefix length, such as 10.0.0.0/8")
    fields.take("gw", _is_ip, "an IP address")
    for key in ("mtu", "advmss", "priority", "table", "scope"):
        fields.whole(key, 0, 255 if key == "scope" else _HIGHEST)


def _need(fields: Fields, key: str, ok: Check, want: str) -> None:
    if fields.document.get(key) is None:
        fields.document = {**fields.document, key: ""}
    fields.take(key, ok, want)


def _is_cidr(value: Any) -> bool:
    try:
        # Python would take a mask for a length, too, and Go's net.ParseCIDR does not.
        is_form = isinstance(value, str) and value.rpartition("/")[2].isdecimal() and "/" in value and "%" not in value
        return is_form and bool(ipaddress.ip_interface(value))
    except ValueError:
        return False


def _is_ip(value: Any) -> bool:
    try:
        return value == "" or (isinstance(value, str) and "%" not in value and bool(ipaddress.ip_address(value)))
    except ValueError:
        return False


def _are_objects(value: Any) -> bool:
    return is_list(value) and len(value) <= MAX_ITEMS and all(map(is_object, value))


def _are_texts(value: Any) -> bool:
    return is_list(value) and all(map(is_text, value))
