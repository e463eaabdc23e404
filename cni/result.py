"""CNI results: built, joined to a previous plugin's, checked where they came from elsewhere, told in another version.

What is checked is what Go's types take, since whoever reads our answer is written in Go.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.errors import RequestInvalid
from agent.hardware.host import Route
from agent.model.fields import join, shown

Document = Mapping[str, Any]
RT_SCOPE_LINK = 253
_ROUTE_KEYS = ("mtu", "advmss", "priority", "table", "scope")
MAX_ITEMS = 1024
_SINCE_1_1 = {"interfaces": ("mtu", "socketPath", "pciID"), "routes": _ROUTE_KEYS}
"""Keys that came with 1.1.0 (CNI specification, section "ADD Success")."""
_HIGHEST = 2**32 - 1


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


def build(version: str, previous: Mapping[str, Any] | None, made: Sequence[tuple[Document, Leases]]) -> dict[str, Any]:
    """Make the result of an ADD: what came before, and our interfaces, as results have them, with addresses."""
    result: dict[str, Any] = dict(previous or {})
    interfaces = list(result.get("interfaces") or [])
    ips = list(result.get("ips") or [])
    routes = list(result.get("routes") or [])
    dns = result.get("dns") or {}
    for interface, leases in made:
        interfaces.append({key: value for key, value in interface.items() if value})
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
    if not isinstance(document, dict):
        raise RequestInvalid(f"{path or 'the result'} must be an object, is {shown(document)}")
    _check(document, path, _RESULT)
    for part, keys in _ITEMS.items():
        for index, item in enumerate(document.get(part) or ()):
            _check(item, join(join(path, part), index), keys)
    _check(document.get("dns") or {}, join(path, "dns"), _DNS)


def in_version(result: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Convert a checked result to another version: leave out what that does not know, add what it needs."""
    told = {**result, "cniVersion": version}
    if version.startswith("0.") or version == "1.0.0":
        for part, keys in _SINCE_1_1.items():
            if told.get(part):
                told[part] = [{k: v for k, v in item.items() if k not in keys} for item in told[part]]
    if told.get("ips"):
        told["ips"] = [ip_in_version(ip, version) for ip in told["ips"]]
    return told


def ip_in_version(ip: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Convert an entry of `ips` to a version: before 1.0.0 each names its family."""
    told = {key: value for key, value in ip.items() if key != "version"}
    if version.startswith("0."):
        told["version"] = "6" if ":" in ip["address"] else "4"
    return told


def _check(document: Mapping[str, Any], path: str, keys: Mapping[str, _Check]) -> None:
    """Compare the values of keys with what they must be. None stands for an absent one: Go writes null for both."""
    for key, (is_right, want) in keys.items():
        value = document.get(key)
        if value is None and key in _NEEDED:
            value = ""
        if value is not None and not is_right(value):
            raise RequestInvalid(f"{join(path, key)} must be {want}, is {shown(value)}")


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


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_ITEMS and all(isinstance(item, dict) for item in value)


def _whole(low: int, high: int) -> _Check:
    return lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high}"


_Check = tuple[Callable[[Any], bool], str]
_TEXT: _Check = _is_text, "a text"
_IP: _Check = _is_ip, "an IP address"
_NEEDED = ("address", "dst")
_ITEMS: Mapping[str, Mapping[str, _Check]] = {
    "interfaces": dict.fromkeys(("name", "mac", "sandbox", "socketPath", "pciID"), _TEXT)
    | {"mtu": _whole(0, _HIGHEST)},
    "ips": {
        "address": (_is_cidr, "an address with its prefix length, such as 10.0.0.2/24"),
        "gateway": _IP,
        "interface": _whole(-1, MAX_ITEMS),
        "version": (("", "4", "6").__contains__, "4 or 6"),  # libcni writes "" for one that is not told
    },
    "routes": {
        "dst": (_is_cidr, "a destination with its prefix length, such as 10.0.0.0/8"),
        "gw": _IP,
        **dict.fromkeys(_ROUTE_KEYS, _whole(0, _HIGHEST)),
        "scope": _whole(0, 255),
    },
}
_RESULT: Mapping[str, _Check] = {
    "cniVersion": (_is_text, "a version"),
    **dict.fromkeys(_ITEMS, (_are_objects, "a list of objects")),
    "dns": (lambda value: isinstance(value, dict), "an object"),
}
_DNS = dict.fromkeys(("nameservers", "search", "options"), (_are_texts, "a list of texts")) | {"domain": _TEXT}
