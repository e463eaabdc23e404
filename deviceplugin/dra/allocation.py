"""A ResourceClaim of the API → what of its allocation is ours to prepare, and for whom. Pure.

Fields that are not read here do not matter; those that are have the types that the API server enforces, or the claim
is refused: in an error that names the field, and no other way, whatever comes in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.errors import ClaimInvalid, RequestInvalid
from agent.model.allocation import ClaimRef, PodRef
from agent.model.fields import Fields, is_list, is_object, shown
from agent.model.printable import parse_quantity

EXTENDED = "resource.kubernetes.io/extended-resource-claim"
"""Annotation of a claim that the scheduler made for a pod's extended resources."""
POD_CLAIM = "resource.kubernetes.io/pod-claim-name"
"""Annotation of a claim that was made from a template: its name in the pod's spec."""
MAX_RESULTS = 64
"""The API server allows 32."""
MAX_CONFIGS = 128
"""It allows 32 of a claim, and as many of each class."""
MAX_PODS = 1024
"""It allows 256."""
MAX_TEXT = 512
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
    consumed: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Capacity → quantity of it, where the device can be shared."""
    tolerations: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)

    @property
    def base(self) -> str:
        """The request as kubelet knows it."""
        return self.request.partition("/")[0]

    @property
    def shares(self) -> int:
        """How many shares of an adapter it takes up: one, where the scheduler knows of no capacity."""
        return parse_quantity(self.consumed.get(f"{self.driver}/shares", 1))


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
        return _read(Fields(document, what="the claim"), ref, driver, pool)
    except RequestInvalid as error:
        raise ClaimInvalid(f"claim {ref}: {error}") from error


def results_of(document: Any) -> tuple[Result, ...]:
    """List what a claim has got, of any driver; nothing if it is not allocated. Raises ClaimInvalid."""
    try:
        status = Fields(document, what="the claim").inside("status")
        devices = status.inside("allocation").inside("devices")
        return tuple(_result(each) for each in _entries(devices, "results", MAX_RESULTS))
    except RequestInvalid as error:
        raise ClaimInvalid(str(error)) from error


def _read(claim: Fields, ref: ClaimRef, driver: str, pool: str) -> Allocation:
    meta, status = claim.inside("metadata"), claim.inside("status")
    uid = _text(meta, "uid")
    if uid != ref.uid:
        raise RequestInvalid(f"has the UID {uid!r}, not {ref.uid!r}: it was deleted and made again")
    if status.mapping("allocation") is None:
        raise RequestInvalid("is not allocated")
    devices = status.inside("allocation").inside("devices")
    results = [_result(each) for each in _entries(devices, "results", MAX_RESULTS)]
    mine = tuple(result for result in results if result.driver == driver)
    if not mine:
        raise RequestInvalid(f"has no device of the driver {driver}")
    for result in mine:
        if result.pool != pool:
            raise RequestInvalid(f"request {result.request} has a device of pool {result.pool!r}, not of {pool!r}")
    keys = [(result.base, result.device, result.share_id) for result in mine]
    for key in keys:
        if keys.count(key) > 1:
            raise RequestInvalid(f"request {key[0]} has {key[1]} twice")
    configs = [_opaque(each, driver) for each in _entries(devices, "config", MAX_CONFIGS)]
    found = [config for config in configs if config is not None]
    annotations = meta.mapping("annotations") or {}
    is_extended = annotations.get(EXTENDED) == "true"
    pods, groups = _reserved_for(status, ref)
    owner = _owner(meta, is_extended, pods)
    pod_claim = annotations.get(POD_CLAIM)
    return Allocation(
        ref,
        mine,
        tuple(result for result in results if result.driver != driver),
        tuple(sorted(found, key=_class_first)),
        pods,
        groups,
        owner,
        pod_claim if owner and isinstance(pod_claim, str) and _LABEL.fullmatch(pod_claim) else "",
        is_extended,
        frozenset(_pinned(claim.inside("spec").inside("devices"))),
    )


def _pinned(devices: Fields) -> Iterator[str]:
    requests = {_needed(each, "name"): each for each in _entries(devices, "requests", MAX_RESULTS)}
    for name, request in requests.items():
        if request.inside("exactly").take("selectors", is_list, "a list"):
            yield name
        for way in _entries(request, "firstAvailable", MAX_RESULTS):
            if way.take("selectors", is_list, "a list"):
                yield f"{name}/{_needed(way, 'name')}"
    for constraint in _entries(devices, "constraints", MAX_RESULTS):
        yield from constraint.take("requests", _are_texts, "a list of at most 64 texts") or requests


def _result(fields: Fields) -> Result:
    consumed = fields.mapping("consumedCapacity") or {}
    for name, amount in consumed.items():
        if not _is_quantity(amount):
            raise RequestInvalid(f"{fields.path}.consumedCapacity.{name} must be a quantity, is {shown(amount)}")
    tolerations = fields.take("tolerations", _are_objects, "a list of at most 64 objects") or []
    request = _needed(fields, "request")
    if not _REQUEST.fullmatch(request):
        raise RequestInvalid(
            f"{fields.path}.request must be the name of a request, or of a request and a sub-request separated by '/',"
            f" each of at most 63 of the characters a-z, 0-9 and '-', is {shown(request)}"
        )
    return Result(
        request,
        _needed(fields, "driver"),
        _needed(fields, "pool"),
        _needed(fields, "device"),
        _text(fields, "shareID"),
        bool(fields.flag("adminAccess")),
        dict(consumed),
        tuple(tolerations),
    )


def _opaque(fields: Fields, driver: str) -> Opaque | None:
    """Read an entry; None if it is not for us."""
    opaque = fields.inside("opaque")
    if _text(opaque, "driver") != driver:
        return None
    source = fields.word("source", ("FromClass", "FromClaim"))
    requests = fields.take("requests", _are_texts, "a list of at most 64 texts") or []
    return Opaque(opaque.document.get("parameters"), tuple(requests), source == "FromClass")


def _class_first(config: Opaque) -> bool:
    return not config.from_class


def _reserved_for(status: Fields, ref: ClaimRef) -> tuple[tuple[PodRef, ...], frozenset[str]]:
    """List the pods, and the names of the PodGroups."""
    pods, groups = [], set()
    for entry in _entries(status, "reservedFor", MAX_PODS):
        what = _text(entry, "apiGroup"), _text(entry, "resource")
        if what == ("", "pods"):
            pods.append(PodRef(ref.namespace, _needed(entry, "name"), _needed(entry, "uid")))
        elif what == ("scheduling.k8s.io", "podgroups"):
            groups.add(_needed(entry, "name"))
    return tuple(pods), frozenset(groups)


def _owner(meta: Fields, is_extended: bool, pods: Collection[PodRef]) -> str:
    """Find the pod that kubelet lets use a claim that has an owner: as it does, by the controlling reference.

    Who makes a claim may write any pod there. For which pods it is reserved only the control plane says.
    """
    for entry in _entries(meta, "ownerReferences", MAX_PODS):
        is_pod = (_text(entry, "apiVersion"), _text(entry, "kind")) == ("v1", "Pod")
        if is_pod and (entry.flag("controller") or is_extended):
            uid = _needed(entry, "uid")
            return uid if any(pod.uid == uid for pod in pods) else ""
    return ""


def _entries(fields: Fields, key: str, most: int) -> Sequence[Fields]:
    listed = fields.take(key, _at_most(most), f"a list of at most {most} objects") or []
    path = f"{fields.path}.{key}" if fields.path else key
    return [Fields(entry, f"{path}[{i}]") for i, entry in enumerate(listed)]


def _text(fields: Fields, key: str) -> str:
    return fields.take(key, _is_short, f"a text of at most {MAX_TEXT} characters") or ""


def _needed(fields: Fields, key: str) -> str:
    found = _text(fields, key)
    if not found:
        raise RequestInvalid(f"{fields.path}.{key} is missing")
    return found


def _at_most(most: int) -> Callable[[Any], bool]:
    def is_it(value: Any) -> bool:
        return is_list(value) and len(value) <= most

    return is_it


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _is_quantity(value: Any) -> bool:
    if not _is_short(value):
        return False
    try:
        parse_quantity(value)
    except ValueError:
        return False
    return True


def _are_texts(value: Any) -> bool:
    return is_list(value) and len(value) <= 64 and all(map(_is_short, value))


def _are_objects(value: Any) -> bool:
    return is_list(value) and len(value) <= 64 and all(map(is_object, value))
