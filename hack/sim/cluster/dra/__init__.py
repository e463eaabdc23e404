"""What the API server enforces for resource.k8s.io: gates that drop fields, defaults, rules with its wording.

A server of Kubernetes 1.36: `pkg/registry/resource/*/strategy.go`, `pkg/apis/resource/validation/validation.go`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hack.sim.cluster.dra import claims, gates, slices
from hack.sim.cluster.dra.problems import Problems
from hack.sim.cluster.field_sets import copied
from hack.sim.cluster.kinds import Kind

_RULES: Mapping[str, Callable[[Problems, Mapping[str, Any], Mapping[str, Any] | None], None]] = {
    "ResourceSlice": slices.check,
    "ResourceClaim": claims.check_claim,
    "ResourceClaimTemplate": claims.check_template,
    "DeviceClass": claims.check_class,
}


class Invalid(Exception):
    """The object is refused, with status 422."""


def admitted(
    kind: Kind, name: str, document: Mapping[str, Any], old: Mapping[str, Any] | None, on: frozenset[str], now: str
) -> dict[str, Any]:
    """Return what is stored of a document: without fields of gates that are off (`on` has the others), with defaults.

    `old` is what is stored now. Raises Invalid.
    """
    found: dict[str, Any] = copied(document)
    if kind.kind not in _RULES:
        return found
    gates.drop(kind.kind, found, old, on)
    if kind.kind == "ResourceSlice":
        slices.set_defaults(found, now)
    problems = Problems()
    _RULES[kind.kind](problems, found, old)
    if problems.found:
        text = problems.found[0] if len(problems.found) == 1 else f"[{', '.join(problems.found)}]"
        raise Invalid(f'{kind.group} "{name}" is invalid: {text}')
    return found
