"""A ResourceClaim of the API → what of its allocation is ours to prepare, and for whom. Pure.

The API server holds its fields to their types and limits. One that has another type all the same refuses the claim, in
an error that names the field.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent.errors import ClaimInvalid, Unavailable
from agent.model.allocation import ClaimRef, PodRef
from agent.model.fields import at, objects_at
from agent.model.printable import parse_quantity
from cni.pod_devices import groups_of, pods_of

EXTENDED = "resource.kubernetes.io/extended-resource-claim"
"""Annotation of a claim that the scheduler made for a pod's extended resources."""
POD_CLAIM = "resource.kubernetes.io/pod-claim-name"
"""Annotation of a claim that was made from a template: its name in the pod's spec."""
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_REQUEST = re.compile(rf"{_LABEL.pattern}(/{_LABEL.pattern})?")
"""Its first part becomes part of file names, and of a path in containers: 63 characters leave room in both."""


@dataclass(frozen=True, slots=True)
class Result:
    """A device that the scheduler has allocated for a request."""

    request: str
    """With its sub-request, if it has one: nic, nic/fast."""
    driver: str
    pool: str
    device: str
    share_id: str = ""
    admin: bool = False
    """Admin access: whoever else has the device."""
    shares: int = 1
    """How many shares of an adapter it takes up: one, where the scheduler knows of no capacity."""
    tolerated: frozenset[str] = frozenset()
    """Keys of the taints that it tolerates."""

    @property
    def base(self) -> str:
        """The request as kubelet knows it."""
        return self.request.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Opaque:
    """Parameters for our driver, from a DeviceClass or from the claim."""

    parameters: Any
    requests: tuple[str, ...] = ()
    """That it is for, with or without sub-request; empty for all."""
    from_class: bool = False

    def is_for(self, result: Result) -> bool:
        """Tell whether it is for a result: naming a request means all of its sub-requests."""
        return not self.requests or result.request in self.requests or result.base in self.requests


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a claim got, as far as this driver needs to know."""

    ref: ClaimRef
    results: tuple[Result, ...]
    """Ours."""
    others: tuple[Result, ...] = ()
    """Those of other drivers."""
    configs: tuple[Opaque, ...] = ()
    """Those of classes first, each list in its order: what comes later wins."""
    pods: tuple[PodRef, ...] = ()
    """Pods that the claim is reserved for; of a group's those of this node, once they are looked up."""
    groups: frozenset[str] = frozenset()
    """Names of the PodGroups that it is reserved for."""
    only_pod: str = ""
    """UID of the pod that owns it: it was made from a template, or for the pod's extended resources."""
    pod_claim: str = ""
    """Name that the pod has for it, where it was made from a template."""
    is_extended: bool = False
    """Whether it stands for extended resources."""
    pinned: frozenset[str] = frozenset()
    """Requests and sub-requests (nic/near) whose devices are not just any of their class: they have selectors of their
    own, or a constraint is about them."""

    def is_pinned(self, result: Result) -> bool:
        """Tell whether another device of the same class would not do."""
        return result.request in self.pinned or result.base in self.pinned


def ours(document: Any, ref: ClaimRef, driver: str, pool: str) -> Allocation:
    """Read what a claim has of our driver's.

    Raises ClaimInvalid if it is another claim by now, is not allocated, has nothing of ours or something of another
    node's pool, and for whatever is no claim.
    """
    try:
        return _read(document, ref, driver, pool)
    except (Unavailable, ValueError) as error:
        raise ClaimInvalid(f"claim {ref}: {error}") from error


def results_of(document: Any) -> tuple[Result, ...]:
    """List what a claim has got, of any driver; nothing if it is not allocated. Raises Unavailable and ValueError."""
    return tuple(map(_result, objects_at(document, "status.allocation.devices.results")))


def _result(found: Mapping[str, Any]) -> Result:
    request, driver = at(found, "request", str), at(found, "driver", str)
    if not _REQUEST.fullmatch(request):
        raise ValueError(f"{request!r} must be the name of a request, or of a request and a sub-request")
    return Result(
        request,
        driver,
        at(found, "pool", str),
        at(found, "device", str),
        at(found, "shareID", str, ""),
        found.get("adminAccess") is True,
        parse_quantity(at(found, "consumedCapacity", dict, {}).get(f"{driver}/shares", 1)),
        frozenset(at(each, "key", str, "") for each in objects_at(found, "tolerations")),
    )


def _read(claim: Any, ref: ClaimRef, driver: str, pool: str) -> Allocation:
    uid = at(claim, "metadata.uid", str, "")
    if uid != ref.uid:
        raise ValueError(f"has the UID {uid!r}, not {ref.uid!r}: it was deleted and made again")
    results = results_of(claim)
    if not results:
        raise ValueError("is not allocated")
    mine = tuple(result for result in results if result.driver == driver)
    if not mine:
        raise ValueError(f"has no device of the driver {driver}")
    for result in mine:
        if result.pool != pool:
            raise ValueError(f"request {result.request} has a device of pool {result.pool!r}, not of {pool!r}")
    keys = Counter((result.base, result.device, result.share_id) for result in mine)
    for (request, device, _), count in keys.items():
        if count > 1:
            raise ValueError(f"request {request} has {device} twice")
    annotations = at(claim, "metadata.annotations", dict, {})
    is_extended = annotations.get(EXTENDED) == "true"
    pods = tuple(pods_of(claim))
    owner = _owner(claim, is_extended, pods)
    pod_claim = annotations.get(POD_CLAIM)
    return Allocation(
        ref,
        mine,
        tuple(result for result in results if result.driver != driver),
        tuple(sorted(_configs(claim, driver), key=lambda config: not config.from_class)),
        pods,
        frozenset(groups_of(claim)),
        owner,
        pod_claim if owner and isinstance(pod_claim, str) and _LABEL.fullmatch(pod_claim) else "",
        is_extended,
        frozenset(_pinned(claim)),
    )


def _configs(claim: Any, driver: str) -> Iterator[Opaque]:
    for each in objects_at(claim, "status.allocation.devices.config"):
        opaque, is_of_class = at(each, "opaque", dict, {}), at(each, "source", str, "") == "FromClass"
        if opaque.get("driver") == driver:
            yield Opaque(opaque.get("parameters"), tuple(map(str, at(each, "requests", list, []))), is_of_class)


def _pinned(claim: Any) -> Iterator[str]:
    requests = objects_at(claim, "spec.devices.requests")
    for request in requests:
        name = at(request, "name", str)
        if at(request, "exactly.selectors", list, []):
            yield name
        ways = objects_at(request, "firstAvailable")
        yield from (f"{name}/{at(way, 'name', str)}" for way in ways if at(way, "selectors", list, []))
    for constraint in objects_at(claim, "spec.devices.constraints"):
        names = at(constraint, "requests", list, []) or [request.get("name") for request in requests]
        yield from map(str, names)


def _owner(claim: Any, is_extended: bool, pods: Collection[PodRef]) -> str:
    """Find the pod that kubelet lets use a claim that has an owner: as it does, by the controlling reference.

    Who makes a claim may write any pod there. For which pods it is reserved only the control plane says.
    """
    for entry in objects_at(claim, "metadata.ownerReferences"):
        is_controller = is_extended or entry.get("controller") is True
        if (entry.get("apiVersion"), entry.get("kind")) == ("v1", "Pod") and is_controller:
            uid = at(entry, "uid", str)
            return uid if any(pod.uid == uid for pod in pods) else ""
    return ""
