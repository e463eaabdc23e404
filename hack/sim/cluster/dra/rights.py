"""Rights on the status of a claim, part by part (gate DRAResourceClaimGranularStatusAuthorization).

Source: Kubernetes 1.36, pkg/registry/resource/resourceclaim/strategy.go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hack.sim.cluster.dra.gates import GRANULAR
from hack.sim.cluster.dra.problems import Problems


@dataclass(frozen=True, slots=True)
class Caller:
    """Who writes: its rights besides those on `resourceclaims/status`, and the node that its token tells."""

    rights: frozenset[tuple[str, str, str]] = frozenset()
    """(`binding` or `driver`, verb, driver or "" for binding)."""
    node: str = ""


def refused(
    caller: Caller, verb: str, status: Mapping[str, Any], old: Mapping[str, Any], on: frozenset[str]
) -> list[str]:
    """List what of a change of a claim's status the caller may not do. `verb` is patch or update."""
    problems = Problems()
    if GRANULAR not in on:
        return []
    is_bound = any(status.get(key) != old.get(key) for key in ("allocation", "reservedFor"))
    if is_bound and ("binding", verb, "") not in caller.rights:
        problems.forbidden("status", f"changing allocation or reservedFor needs {verb} on resourceclaims/binding")
    node = _node(status.get("allocation") or old.get("allocation") or {})
    for driver in sorted(set(_changed_drivers(status, old))):
        here = ("driver", f"associated-node:{verb}", driver) in caller.rights and caller.node and node == caller.node
        if not here and ("driver", f"arbitrary-node:{verb}", driver) not in caller.rights:
            text = f"changing devices of {driver} needs associated-node:{verb} or arbitrary-node:{verb} on "
            problems.forbidden("status.devices", f"{text}resourceclaims/driver")
    return problems.found


def _changed_drivers(status: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[str]:
    after, before = status.get("devices") or [], old.get("devices") or []
    for device in (*after, *before):
        if device not in after or device not in before:
            yield device.get("driver", "")


def _node(allocation: Mapping[str, Any]) -> str:
    """Return the one node that an allocation is for."""
    terms = allocation.get("nodeSelector", {}).get("nodeSelectorTerms") or []
    fields = terms[0].get("matchFields") or [] if len(terms) == 1 else []
    if len(fields) == 1 and fields[0]["key"] == "metadata.name" and len(fields[0]["values"]) == 1:
        return str(fields[0]["values"][0])
    return ""
