"""A CNI result that came from elsewhere, checked field by field, and told in another version.

What is checked is what Go's types take, since whoever reads our answer is written in Go.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import Any

from cni.fields import Fields, join

MAX_ITEMS = 1024
_SINCE_1_1 = {"interfaces": ("mtu", "socketPath", "pciID"), "routes": ("mtu", "advmss", "priority", "table", "scope")}
"""Keys that came with 1.1.0 (CNI specification, section "ADD Success")."""
_HIGHEST = 2**32 - 1


def check(document: Any, path: str = "") -> None:
    """Raise RequestInvalid with the path of the first thing that no CNI result has."""
    fields = Fields(document, path, what="the result")
    fields.take("cniVersion", lambda v: isinstance(v, str), "a version")
    for key, check_item in (("interfaces", _interface), ("ips", _ip), ("routes", _route)):
        items = fields.take(
            key,
            lambda v: isinstance(v, list) and len(v) <= MAX_ITEMS and all(isinstance(item, dict) for item in v),
            "a list of objects",
        )
        for index, item in enumerate(items or ()):
            check_item(Fields(item, join(join(path, key), index)))
    dns = fields.inside("dns")
    for key in ("nameservers", "search", "options"):
        dns.take(key, lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v), "a list of texts")
    dns.take("domain", lambda v: isinstance(v, str), "a text")


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
        fields.take(key, lambda v: isinstance(v, str), "a text")
    fields.whole("mtu", 0, _HIGHEST)


def _ip(fields: Fields) -> None:
    _need(fields, "address", _is_cidr, "an address with its prefix length, such as 10.0.0.2/24")
    fields.take("gateway", _is_ip, "an IP address")
    fields.whole("interface", -1, MAX_ITEMS)
    fields.take("version", lambda v: v in ("", "4", "6"), '"4" or "6"')  # libcni writes "" for one that is not told


def _route(fields: Fields) -> None:
    _need(fields, "dst", _is_cidr, "a destination with its prefix length, such as 10.0.0.0/8")
    fields.take("gw", _is_ip, "an IP address")
    for key in ("mtu", "advmss", "priority", "table", "scope"):
        fields.whole(key, 0, 255 if key == "scope" else _HIGHEST)


def _need(fields: Fields, key: str, ok: Callable[[Any], bool], want: str) -> None:
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
