"""The rules of ResourceClaims, of their templates and status, and of DeviceClasses.

Source: Kubernetes 1.36, pkg/apis/resource/validation/validation.go.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hack.sim.cluster.dra.problems import UUID, Problems
from hack.sim.cluster.dra.slices import EFFECTS

_KIB = 1024
_EXACTLY = "exactly one of `exactly` or `firstAvailable` is required"
_NAMES = "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'"
_MODES = ("All", "ExactCount")
_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def check_claim(problems: Problems, document: Mapping[str, Any], old: Mapping[str, Any] | None) -> None:
    """List what is wrong with a claim and its status."""
    if old is None:
        _check_spec(problems, document.get("spec", {}), "spec")
    else:
        problems.immutable("spec", document.get("spec"), old.get("spec"))
    names = _request_names(document.get("spec", {}))
    _check_status(problems, document.get("status", {}), (old or {}).get("status", {}), names)


def check_template(problems: Problems, document: Mapping[str, Any], old: Mapping[str, Any] | None) -> None:
    """List what is wrong with a template of claims."""
    if old is None:
        _check_spec(problems, document.get("spec", {}).get("spec", {}), "spec.spec")
    else:
        problems.immutable("spec", document.get("spec"), old.get("spec"))


def check_class(problems: Problems, document: Mapping[str, Any], old: Mapping[str, Any] | None) -> None:
    """List what is wrong with a device class. Its spec may be changed."""
    spec = document.get("spec", {})
    _check_selectors(problems, spec.get("selectors") or [], "spec.selectors")
    _each(problems, spec.get("config") or [], 32, "spec.config", _check_config)
    name = spec.get("extendedResourceName")
    if name is not None and (not _RESOURCE.fullmatch(name) or name.partition("/")[0].endswith("kubernetes.io")):
        problems.invalid("spec.extendedResourceName", name, "must be a valid extended resource name")


def _each(
    problems: Problems, items: Sequence[Any], most: int, path: str, check: Callable[[Problems, Any, str], None]
) -> bool:
    is_within = problems.size(path, items, most)
    if is_within:
        for number, item in enumerate(items):
            check(problems, item, f"{path}[{number}]")
    return is_within


def _request_names(spec: Mapping[str, Any]) -> set[str]:
    """List what constraints and configs may name: requests, and sub-requests after theirs."""
    names = set()
    for request in spec.get("devices", {}).get("requests") or ():
        name = request.get("name", "")
        names |= {name} | {f"{name}/{sub.get('name', '')}" for sub in request.get("firstAvailable") or ()}
    return names


def _check_spec(problems: Problems, spec: Mapping[str, Any], path: str) -> None:
    devices, names = spec.get("devices", {}), _request_names(spec)
    requests = devices.get("requests") or []
    if _each(problems, requests, 32, f"{path}.devices.requests", _check_request):
        problems.unique(f"{path}.devices.requests", [request.get("name") for request in requests])
    constraints, configs = devices.get("constraints") or [], devices.get("config") or []
    if _each(problems, constraints, 32, f"{path}.devices.constraints", _check_constraint):
        _check_references(problems, constraints, names, f"{path}.devices.constraints")
    if _each(problems, configs, 32, f"{path}.devices.config", _check_config):
        _check_references(problems, configs, names, f"{path}.devices.config")


def _check_references(problems: Problems, items: Sequence[Any], names: set[str], path: str) -> None:
    for number, item in enumerate(items):
        wanted = item.get("requests") or []
        problems.unique(f"{path}[{number}].requests", wanted)
        for at, name in enumerate(wanted):
            if name not in names:
                problems.invalid(f"{path}[{number}].requests[{at}]", name, _NAMES)


def _check_request(problems: Problems, request: Mapping[str, Any], path: str) -> None:
    problems.label(f"{path}.name", request.get("name", ""))
    exactly, several = request.get("exactly"), request.get("firstAvailable") or []
    if exactly is None and not several:
        problems.required(path, _EXACTLY)
    elif exactly is not None and several:
        problems.invalid(path, None, f"{_EXACTLY}, but multiple fields are set")
    elif exactly is not None:
        _check_wish(problems, exactly, f"{path}.exactly")
    elif _each(problems, several, 8, f"{path}.firstAvailable", _check_wish):
        for number, one in enumerate(several):
            problems.label(f"{path}.firstAvailable[{number}].name", one.get("name", ""))
        problems.unique(f"{path}.firstAvailable", [one.get("name") for one in several])


def _check_wish(problems: Problems, wish: Mapping[str, Any], path: str) -> None:
    if not wish.get("deviceClassName"):
        problems.required(f"{path}.deviceClassName")
    else:
        problems.subdomain(f"{path}.deviceClassName", wish["deviceClassName"])
    _check_selectors(problems, wish.get("selectors") or [], f"{path}.selectors")
    mode = wish.get("allocationMode", "ExactCount")
    count = wish.get("count", 0 if mode == "All" else 1)
    if mode not in _MODES:
        problems.not_supported(f"{path}.allocationMode", mode, _MODES)
    elif mode == "All" and count:
        problems.invalid(f"{path}.count", count, "must not be specified when allocationMode is 'All'")
    elif mode == "ExactCount" and count <= 0:
        problems.invalid(f"{path}.count", count, "must be greater than zero")
    _each(problems, wish.get("tolerations") or [], 16, f"{path}.tolerations", _check_toleration)


def _check_toleration(problems: Problems, toleration: Mapping[str, Any], path: str) -> None:
    if toleration.get("key"):
        problems.label_name(f"{path}.key", toleration["key"])
    operator, value = toleration.get("operator", "Equal"), toleration.get("value", "")
    if operator == "Exists" and value:
        problems.invalid(f"{path}.value", value, "must be empty for operator `Exists`")
    elif operator not in ("Equal", "Exists"):
        problems.not_supported(f"{path}.operator", operator, ("Equal", "Exists"))
    if toleration.get("effect") and toleration["effect"] not in EFFECTS:
        problems.not_supported(f"{path}.effect", toleration["effect"], EFFECTS)


def _check_selectors(problems: Problems, selectors: Sequence[Any], path: str) -> None:
    _each(problems, selectors, 32, path, _check_selector)


def _check_selector(problems: Problems, selector: Mapping[str, Any], path: str) -> None:
    """Check the form alone: what an expression means is the allocator's business."""
    if "cel" not in selector:
        problems.required(f"{path}.cel")
    elif len(selector["cel"].get("expression", "").encode()) > 10 * _KIB:
        problems.too_long(f"{path}.cel.expression", 10 * _KIB)


def _check_constraint(problems: Problems, constraint: Mapping[str, Any], path: str) -> None:
    for key in ("matchAttribute", "distinctAttribute"):
        if key in constraint:
            if "/" not in constraint[key]:
                text = "a fully qualified name must be a domain and a name separated by a slash"
                problems.invalid(f"{path}.{key}", constraint[key], text)
            return
    text = 'exactly one of "matchAttribute" or "distinctAttribute" is required, but multiple fields are set'
    problems.required(path, text)


def _check_config(problems: Problems, config: Mapping[str, Any], path: str) -> None:
    if "opaque" not in config:
        problems.required(f"{path}.opaque")
        return
    problems.driver(f"{path}.opaque.driver", config["opaque"].get("driver", ""))
    problems.json_object(f"{path}.opaque.parameters", config["opaque"].get("parameters"), 10 * _KIB)


def _key(device: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return device.get("driver", ""), device.get("pool", ""), device.get("device", ""), device.get("shareID", "")


def _check_status(problems: Problems, status: Mapping[str, Any], old: Mapping[str, Any], names: set[str]) -> None:
    reserved, allocation = status.get("reservedFor") or [], status.get("allocation")
    if problems.size("status.reservedFor", reserved, 256):
        for number, consumer in enumerate(reserved):
            for key in ("resource", "name", "uid"):
                if not consumer.get(key):
                    problems.required(f"status.reservedFor[{number}].{key}")
        problems.unique("status.reservedFor", [consumer.get("uid") for consumer in reserved])
    allocated = {_key(result) for result in (allocation or {}).get("devices", {}).get("results") or ()}
    devices = status.get("devices") or []
    for number, device in enumerate(devices):
        path = f"status.devices[{number}]"
        if _key(device) not in allocated:
            problems.invalid(path, "/".join(filter(None, _key(device))), "must be an allocated device in the claim")
        _check_device(problems, device, path)
    problems.unique("status.devices", [list(_key(device)) for device in devices])
    if reserved and allocation is None:
        problems.forbidden("status.reservedFor", "may not be specified when `allocated` is not set")
    if allocation is not None and old.get("allocation") is not None:
        problems.immutable("status.allocation", allocation, old["allocation"])
    elif allocation is not None:
        _check_allocation(problems, allocation.get("devices", {}), names)


def _check_allocation(problems: Problems, allocation: Mapping[str, Any], names: set[str]) -> None:
    path = "status.allocation.devices"
    results = allocation.get("results") or []
    if problems.size(f"{path}.results", results, 32):
        for number, result in enumerate(results):
            where = f"{path}.results[{number}]"
            if result.get("request") not in names:
                problems.invalid(f"{where}.request", result.get("request"), _NAMES)
            problems.driver(f"{where}.driver", result.get("driver", ""))
            problems.pool(f"{where}.pool", result.get("pool", ""))
            problems.label(f"{where}.device", result.get("device", ""))
            _check_share(problems, result, where)
    configs = allocation.get("config") or []
    if _each(problems, configs, 64, f"{path}.config", _check_config):
        for number, config in enumerate(configs):
            if config.get("source") not in ("FromClaim", "FromClass"):
                problems.not_supported(
                    f"{path}.config[{number}].source", config.get("source", ""), ("FromClaim", "FromClass")
                )
        _check_references(problems, configs, names, f"{path}.config")


def _check_share(problems: Problems, device: Mapping[str, Any], path: str) -> None:
    if "shareID" in device and not UUID.fullmatch(device["shareID"]):
        problems.invalid(f"{path}.shareID", device["shareID"], "error validating uid: invalid UUID length")


def _check_device(problems: Problems, device: Mapping[str, Any], path: str) -> None:
    problems.driver(f"{path}.driver", device.get("driver", ""))
    problems.pool(f"{path}.pool", device.get("pool", ""))
    problems.label(f"{path}.device", device.get("device", ""))
    _check_share(problems, device, path)
    conditions = device.get("conditions") or []
    if problems.size(f"{path}.conditions", conditions, 8):
        problems.unique(f"{path}.conditions", [condition.get("type") for condition in conditions])
        for number, condition in enumerate(conditions):
            _check_condition(problems, condition, f"{path}.conditions[{number}]")
    if device.get("data") is not None:
        problems.json_object(f"{path}.data", device["data"], 10 * _KIB)
    network = device.get("networkData") or {}
    for key, most in (("interfaceName", 256), ("hardwareAddress", 128)):
        if len(network.get(key, "").encode()) > most:
            problems.too_long(f"{path}.networkData.{key}", most)
    addresses = network.get("ips") or []
    if problems.size(f"{path}.networkData.ips", addresses, 16):
        problems.unique(f"{path}.networkData.ips", addresses)
        for number, address in enumerate(addresses):
            _check_address(problems, address, f"{path}.networkData.ips[{number}]")


def _check_condition(problems: Problems, condition: Mapping[str, Any], path: str) -> None:
    problems.label_name(f"{path}.type", condition.get("type", ""))
    if condition.get("status") not in ("False", "True", "Unknown"):
        problems.not_supported(f"{path}.status", condition.get("status", ""), ("False", "True", "Unknown"))
    for key in ("lastTransitionTime", "reason"):
        if not condition.get(key):
            problems.required(f"{path}.{key}")
    if len(condition.get("message", "").encode()) > 32 * _KIB:
        problems.too_long(f"{path}.message", 32 * _KIB)


def _check_address(problems: Problems, address: str, path: str) -> None:
    try:
        found = ipaddress.ip_interface(address)
    except ValueError:
        found = None
    if found is None or "/" not in address:
        problems.invalid(path, address, "must be a valid address in CIDR form, (e.g. 10.9.8.7/24 or 2001:db8::1/64)")
    elif str(found) != address:
        problems.invalid(path, address, f'must be in canonical form ("{found}")')
