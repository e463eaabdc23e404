"""Which devices a request may have: CEL selectors and tolerations, as the scheduler evaluates them.

Source: Kubernetes 1.36, staging/src/k8s.io/dynamic-resource-allocation (cel, resourceclaim, structured).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cel_expr_python import cel

Document = Mapping[str, Any]
_DOMAINS = re.compile(r"(?:attributes|capacity)\[\s*[\"']([^\"']+)[\"']\s*\]")


class SelectorFailed(Exception):
    """An expression has no value for a device, as when it reads an attribute that is not there: the pod waits."""


def qualified(name: str, driver: str) -> tuple[str, str]:
    """Split a name into domain and name; without a domain it is the driver's."""
    domain, slash, rest = name.partition("/")
    return (domain, rest) if slash else (driver, name)


def plain(attribute: Mapping[str, Any]) -> Any:
    """Return an attribute's value."""
    [value] = attribute.values()
    return value


def holds(expression: str, driver: str, device: Document) -> bool:
    """Evaluate a selector. A domain that a device knows nothing of is an empty map. Raises SelectorFailed."""
    domains = _DOMAINS.findall(expression)
    sections: dict[str, dict[str, dict[str, Any]]] = {}
    for section, read in (("attributes", plain), ("capacity", lambda each: each["value"])):
        found: dict[str, dict[str, Any]] = {domain: {} for domain in domains}
        for name, value in device.get(section, {}).items():
            domain, rest = qualified(name, driver)
            found.setdefault(domain, {})[rest] = read(value)
        sections[section] = found
    shown = {"driver": driver, "allowMultipleAllocations": device.get("allowMultipleAllocations", False), **sections}
    result = _compiled(expression).eval(data={"device": shown})
    if result.type() in (cel.Type.ERROR, cel.Type.UNKNOWN):
        raise SelectorFailed(f"{device['name']}: {expression}: {result.plain_value()}")
    return bool(result.plain_value())


def tolerated(taints: Sequence[Document], tolerations: Sequence[Document]) -> bool:
    """Tell whether every taint that keeps pods away is tolerated."""
    return all(
        taint["effect"] == "None" or any(_tolerates(toleration, taint) for toleration in tolerations)
        for taint in taints
    )


def _tolerates(toleration: Document, taint: Document) -> bool:
    if toleration.get("effect", taint["effect"]) != taint["effect"]:
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return bool(toleration.get("key", taint["key"]) == taint["key"])
    return (toleration.get("key"), toleration.get("value", "")) == (taint["key"], taint.get("value", ""))


@functools.cache
def _compiled(expression: str) -> cel.Expression:
    return cel.NewEnv(variables={"device": cel.Type.DYN}).compile(expression)
