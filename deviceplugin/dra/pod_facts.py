"""What a pod's object tells of its claims and containers. Pure: documents of the API in, and whatever is wrong in one
tells nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_OF_CONTAINER = re.compile(r"container-([0-9]{1,4})-request-[0-9]{1,4}")


def container_of(request: str) -> int | None:
    """Tell the number of the container that a request of an extended resources' claim is for; init containers count
    first. The scheduler names them so."""
    found = _OF_CONTAINER.fullmatch(request)
    return int(found[1]) if found else None


def containers(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """Name a pod's containers as the scheduler counts them."""
    return tuple(str(container.get("name")) for container in _containers(pod))


def claim_names(pod: Mapping[str, Any]) -> Mapping[str, str]:
    """Map the names of a pod's claims, as its containers know them, to those of the ResourceClaims."""
    status = _inside(pod, "status")
    told = _listed(status, "resourceClaimStatuses")
    made = {each["name"]: each.get("resourceClaimName") for each in told if isinstance(each.get("name"), str)}
    found = {}
    for each in _listed(_inside(pod, "spec"), "resourceClaims"):
        own = each.get("name")
        if isinstance(own, str) and isinstance(name := each.get("resourceClaimName") or made.get(own), str):
            found[own] = name
    return found


def group_of(pod: Mapping[str, Any]) -> str:
    """Name the PodGroup that a pod belongs to; empty for none."""
    name = _inside(_inside(pod, "spec"), "schedulingGroup").get("podGroupName")
    return name if isinstance(name, str) else ""


def names_all_of(pod: Mapping[str, Any], claim: str) -> bool:
    """Tell whether each container that names a claim names all of it, none a request alone."""
    own = {name for name, of in claim_names(pod).items() if of == claim}
    named = [
        entry
        for container in _containers(pod)
        for entry in _listed(_inside(container, "resources"), "claims")
        if entry.get("name") in own
    ]
    return not any(entry.get("request") for entry in named)


def _containers(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    spec = _inside(pod, "spec")
    yield from _listed(spec, "initContainers")
    yield from _listed(spec, "containers")


def _inside(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = document.get(key)
    return found if isinstance(found, Mapping) else {}


def _listed(document: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    found = document.get(key)
    yield from (entry for entry in found if isinstance(entry, Mapping)) if isinstance(found, list) else ()
