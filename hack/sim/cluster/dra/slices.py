"""The rules of ResourceSlices.

Source: Kubernetes 1.36, pkg/apis/resource/validation/validation.go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from agent.model.printable import parse_exact
from hack.sim.cluster.dra.gates import LIST_KEYS
from hack.sim.cluster.dra.problems import Problems

MOST_DEVICES = 128
MOST_ADVANCED_DEVICES = 64
EFFECTS = ("NoExecute", "NoSchedule", "None")
_WHERE = ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")
_ONE_WHERE = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required"
_SCALARS = ("bool", "int", "string", "version")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(-(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(\.(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*)?"
    r"(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?"
)


def set_defaults(document: dict[str, Any], now: str) -> None:
    """Give each taint without a time the one of this moment, and write amounts in the server's own way."""
    for device in document.get("spec", {}).get("devices") or ():
        for taint in device.get("taints") or ():
            taint.setdefault("timeAdded", now)
        for amount in device.get("capacity", {}).values():
            amount["value"] = _canonical(amount["value"])


def _canonical(text: str) -> str:
    """Write a whole decimal amount as the server does: 1000 is 1k."""
    if not text.isdecimal():
        return text
    number = int(text)
    for suffix in ("", "k", "M", "G", "T", "P"):
        if not number or number % 1000:
            return f"{number}{suffix}"
        number //= 1000
    return f"{number}E"


def check(problems: Problems, document: Mapping[str, Any], old: Mapping[str, Any] | None) -> None:
    """List what is wrong with a slice."""
    spec: Mapping[str, Any] = document.get("spec", {})
    pool: Mapping[str, Any] = spec.get("pool", {})
    problems.driver("spec.driver", spec.get("driver", ""))
    problems.pool("spec.pool.name", pool.get("name", ""))
    if (count := pool.get("resourceSliceCount", 0)) <= 0:
        problems.invalid("spec.pool.resourceSliceCount", count, "must be greater than zero")
    if (generation := pool.get("generation", 0)) < 0:
        problems.invalid("spec.pool.generation", generation, "must be greater than or equal to zero")
    if old is not None:
        before = old["spec"]
        problems.immutable("spec.pool.name", pool.get("name"), before["pool"]["name"])
        problems.immutable("spec.driver", spec.get("driver"), before["driver"])
        problems.immutable("spec.nodeName", spec.get("nodeName"), before.get("nodeName"))
    _check_where(problems, spec)
    if spec.get("sharedCounters") is not None and spec.get("devices") is not None:
        problems.invalid("spec", "", "only one of `sharedCounters` or `devices` is allowed")
    devices = spec.get("devices") or []
    is_advanced = any(
        device.get("taints")
        or device.get("consumesCounters")
        or any(key in value for value in device.get("attributes", {}).values() for key in LIST_KEYS)
        for device in devices
    )
    if problems.size("spec.devices", devices, MOST_ADVANCED_DEVICES if is_advanced else MOST_DEVICES):
        for number, device in enumerate(devices):
            _check_device(problems, device, f"spec.devices[{number}]")
        problems.unique("spec.devices", [device.get("name") for device in devices])
    counters = spec.get("sharedCounters") or []
    if problems.size("spec.sharedCounters", counters, 8):
        for number, one in enumerate(counters):
            problems.label(f"spec.sharedCounters[{number}].name", one.get("name", ""))
            problems.size(f"spec.sharedCounters[{number}].counters", one.get("counters", {}), 32)


def _check_where(problems: Problems, spec: Mapping[str, Any]) -> None:
    where = [key for key in _WHERE if key in spec]
    for key in where:
        if key == "nodeName":
            if spec[key] == "":
                problems.invalid("spec.nodeName", "", "must be either unset or set to a non-empty string")
            else:
                problems.subdomain("spec.nodeName", spec[key])
        elif spec[key] is False:
            problems.invalid(f"spec.{key}", False, "must be either unset or set to true")
    if not where:
        problems.required("spec", _ONE_WHERE)
    elif len(where) > 1:
        named = "{" + ", ".join(f"`{key}`" for key in where) + "}"
        problems.invalid("spec", named, f"{_ONE_WHERE}, but multiple fields are set")


def _check_device(problems: Problems, device: Mapping[str, Any], path: str) -> None:
    problems.label(f"{path}.name", device.get("name", ""))
    attributes, capacity = device.get("attributes", {}), device.get("capacity", {})
    if len(attributes) + len(capacity) > 32:
        text = "the total number of attributes and capacities must not exceed 32"
        problems.invalid(path, len(attributes) + len(capacity), text)
    values = sum(max(1, sum(len(v.get(key) or ()) for key in LIST_KEYS)) for v in attributes.values())
    if values > 48:
        problems.invalid(path, values, "the total number of attribute values must not exceed 48")
    for name, value in attributes.items():
        _check_name(problems, name, f"{path}.attributes")
        _check_attribute(problems, value, f"{path}.attributes[{name}]")
    for name, amount in capacity.items():
        _check_name(problems, name, f"{path}.capacity")
        _check_capacity(problems, amount, bool(device.get("allowMultipleAllocations")), f"{path}.capacity[{name}]")
    taints = device.get("taints") or []
    if problems.size(f"{path}.taints", taints, 16):
        for number, taint in enumerate(taints):
            where = f"{path}.taints[{number}]"
            problems.label_name(f"{where}.key", taint.get("key", ""))
            problems.label_value(f"{where}.value", taint.get("value", ""))
            if not (effect := taint.get("effect", "")):
                problems.required(f"{where}.effect")
            elif effect not in EFFECTS:
                problems.not_supported(f"{where}.effect", effect, EFFECTS)
    consumed = device.get("consumesCounters") or []
    problems.size(f"{path}.consumesCounters", consumed, 2)


def _check_name(problems: Problems, name: str, path: str) -> None:
    """Check the name of an attribute or capacity: an identifier, perhaps after a domain and a slash."""
    domain, slash, identifier = name.rpartition("/")
    if slash and not domain:
        problems.invalid(path, "", "the domain must not be empty")
    elif slash:
        problems.driver(path, domain)
    if slash and not identifier:
        problems.invalid(path, "", "the name must not be empty")
    elif not _IDENTIFIER.fullmatch(identifier):
        text = "a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric "
        problems.invalid(path, identifier, f"{text}characters or '_'")
    if len(identifier) > 32:
        problems.too_long(path, 32)


def _check_attribute(problems: Problems, value: Mapping[str, Any], path: str) -> None:
    given = [key for key in (*_SCALARS, *LIST_KEYS) if value.get(key) is not None]
    for key in given:
        items = value[key] if key in LIST_KEYS else [value[key]]
        if not items:
            problems.invalid(f"{path}.{key}", items, "must not be empty if specified")
        for number, item in enumerate(items):
            where = f"{path}.{key}[{number}]" if key in LIST_KEYS else f"{path}.{key}"
            if key in ("version", "versions") and not _SEMVER.fullmatch(item):
                problems.invalid(where, item, "must be a string compatible with semver.org spec 2.0.0")
            if isinstance(item, str) and len(item.encode()) > 64:
                problems.too_long(where, 64)
    if len(given) != 1:
        problems.invalid(path, value if given else "", "exactly one value must be specified")


def _check_capacity(problems: Problems, amount: Mapping[str, Any], is_multiple: bool, path: str) -> None:
    policy = amount.get("requestPolicy")
    if policy is None:
        return
    where = f"{path}.requestPolicy"
    if not is_multiple:
        problems.forbidden(where, "allowMultipleAllocations must be true")
        return
    whole, default = parse_exact(amount["value"]), policy.get("default")
    values, bounds = policy.get("validValues") or [], policy.get("validRange")
    if values and bounds is not None:
        text = 'exactly one policy can be specified, cannot specify "validValues" and "validRange" at the same time'
        problems.forbidden(where, text)
    elif (values or bounds is not None) and default is None:
        problems.required(f"{where}.default", f"required when {'validValues' if values else 'validRange'} is defined")
    elif values:
        _check_values(problems, [parse_exact(v) for v in values], parse_exact(default), whole, f"{where}.validValues")
    elif bounds is not None:
        _check_range(problems, bounds, parse_exact(default), whole, f"{where}.validRange")


def _check_values(problems: Problems, values: list[Decimal], default: Decimal, whole: Decimal, path: str) -> None:
    problems.size(path, values, 10)
    for number, value in enumerate(values):
        if number and value < values[number - 1]:
            problems.invalid(f"{path}[{number}]", str(value), "values must be sorted in ascending order")
        if value > whole:
            problems.invalid(f"{path}[{number}]", str(value), f"option is larger than capacity value: {whole}")
    if default not in values:
        problems.invalid(path, str(default), "default value is not valid according to the requestPolicy")


def _check_range(problems: Problems, bounds: Mapping[str, Any], default: Decimal, whole: Decimal, path: str) -> None:
    if (least := bounds.get("min")) is None:
        problems.required(f"{path}.min", "required when validRange is defined")
        return
    least = parse_exact(least)
    most = parse_exact(bounds["max"]) if "max" in bounds else None
    if least > whole:
        problems.invalid(f"{path}.min", str(least), f"min is larger than capacity value: {whole}")
    if default < least:
        problems.invalid(f"{path}.min", str(default), f"default is less than min: {least}")
    if most is not None:
        if least > most:
            problems.invalid(f"{path}.max", str(least), f"min is larger than max: {most}")
        if most > whole:
            problems.invalid(f"{path}.max", str(most), f"max is larger than capacity value: {whole}")
        if default > most:
            problems.invalid(f"{path}.max", str(default), f"default is more than max: {most}")
    if "step" not in bounds:
        return
    step = parse_exact(bounds["step"])
    if step <= 0:
        problems.invalid(f"{path}.step", str(step), "must be greater than zero")
        return
    if least + step > whole:
        text = f"one step {least + step} is larger than capacity value: {whole}"
        problems.invalid(f"{path}.step", str(step), text)
    for value in (default, most):
        if value is not None and (value - least) % step:
            text = f"value is not a multiple of a given step ({step}) from ({least})"
            problems.invalid(f"{path}.step", str(value), text)
