"""A ResourceClaim of the API → what of its allocation is ours to prepare, and for whom. Pure.

Fields that are not read here do not matter; those that are have the types that the API server enforces, or the claim
is refused: in an error that names the field, and no other way, whatever comes in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, TypeAdapter

from agent.config.section import FLAG, JsonSection, Refusal, checked, must_be, required_keys, string, value
from agent.errors import ClaimInvalid, RequestInvalid
from agent.model.allocation import ClaimRef, PodRef
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


def _short(text: str, least: int = 0) -> str:
    if not least <= len(text) <= MAX_TEXT:
        raise ValueError
    return text


def _needed(text: str) -> str:
    return _short(text, 1)


def _request(text: str) -> str:
    if not _REQUEST.fullmatch(text):
        raise ValueError
    return text


def _quantity(text: Any) -> str:
    parse_quantity(_short(text) if isinstance(text, str) else "")
    return str(text)


def _list_of(most: int, what: str) -> BeforeValidator:
    def check(given: Any) -> Any:
        if not isinstance(given, list) or len(given) > most:
            raise must_be(f"a list of at most {most} {what}")
        return given

    return BeforeValidator(check)


Text = Annotated[str, string(f"a text of at most {MAX_TEXT} characters", _short)]
Needed = Annotated[str, string(f"a text of 1 to {MAX_TEXT} characters", _needed)]
Texts = Annotated[tuple[Text, ...], _list_of(MAX_RESULTS, "texts")]
Objects = Annotated[tuple[dict[str, Any], ...], _list_of(MAX_RESULTS, "objects")]
Flag = Annotated[bool, FLAG]


@dataclass(frozen=True, slots=True)
class _Object(JsonSection):
    overlooked: ClassVar[bool] = True

    @classmethod
    def refused(cls, given: Mapping[str, Any]) -> Iterator[Refusal]:
        return (Refusal((key,), "is missing") for key in required_keys(cls) if key not in given)


@dataclass(frozen=True, slots=True)
class Result(_Object):
    """A device that the scheduler has allocated for a request."""

    request: Annotated[
        str,
        string(
            "the name of a request, or of a request and a sub-request separated by '/', each of at most 63 of the"
            " characters a-z, 0-9 and '-'",
            _request,
        ),
    ]
    """With its sub-request, if it has one: nic, nic/fast."""
    driver: Needed
    pool: Needed
    device: Needed
    share_id: Annotated[Text, Field(alias="shareID")] = ""
    admin: Annotated[Flag, Field(alias="adminAccess")] = False
    """Admin access: whoever else has the device."""
    consumed: Annotated[
        dict[str, Annotated[str, value("a quantity", _quantity, {})]], Field(alias="consumedCapacity")
    ] = field(default_factory=dict, hash=False)
    """Capacity → quantity of it, where the device can be shared."""
    tolerations: Objects = field(default=(), hash=False)

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


# ------------------------------------------------------------------------------------------- the claim's document


@dataclass(frozen=True, slots=True)
class _Parameters(_Object):
    driver: Text = ""
    parameters: Any = None


@dataclass(frozen=True, slots=True)
class _Config(_Object):
    source: Text = ""
    requests: Texts = ()
    opaque: _Parameters = field(default_factory=_Parameters)


@dataclass(frozen=True, slots=True)
class _Devices(_Object):
    results: Annotated[tuple[Result, ...], _list_of(MAX_RESULTS, "objects")] = ()
    config: Annotated[tuple[_Config, ...], _list_of(MAX_CONFIGS, "objects")] = ()


@dataclass(frozen=True, slots=True)
class _Allocated(_Object):
    devices: _Devices = field(default_factory=_Devices)


@dataclass(frozen=True, slots=True)
class _Consumer(_Object):
    api_group: Text = ""
    resource: Text = ""
    name: Text = ""
    uid: Text = ""

    def contradictions(self) -> Iterator[Refusal]:
        if self.is_pod and not self.uid:
            yield Refusal(("uid",), "is missing")
        if (self.is_pod or self.is_group) and not self.name:
            yield Refusal(("name",), "is missing")

    @property
    def is_pod(self) -> bool:
        return (self.api_group, self.resource) == ("", "pods")

    @property
    def is_group(self) -> bool:
        return (self.api_group, self.resource) == ("scheduling.k8s.io", "podgroups")


@dataclass(frozen=True, slots=True)
class _Status(_Object):
    allocation: _Allocated | None = None
    reserved_for: Annotated[tuple[_Consumer, ...], _list_of(MAX_PODS, "objects")] = ()


@dataclass(frozen=True, slots=True)
class _Owner(_Object):
    api_version: Text = ""
    kind: Text = ""
    uid: Text = ""
    controller: Flag = False


@dataclass(frozen=True, slots=True)
class _Meta(_Object):
    uid: Text = ""
    annotations: dict[str, Any] = field(default_factory=dict)
    owner_references: Annotated[tuple[_Owner, ...], _list_of(MAX_PODS, "objects")] = ()


@dataclass(frozen=True, slots=True)
class _Way(_Object):
    """One way to meet a request."""

    name: Text = ""
    selectors: Objects = ()


@dataclass(frozen=True, slots=True)
class _Request(_Object):
    name: Text = ""
    exactly: _Way = field(default_factory=_Way)
    first_available: Annotated[tuple[_Way, ...], _list_of(MAX_RESULTS, "objects")] = ()


@dataclass(frozen=True, slots=True)
class _Constraint(_Object):
    requests: Texts = ()


@dataclass(frozen=True, slots=True)
class _Wanted(_Object):
    requests: Annotated[tuple[_Request, ...], _list_of(MAX_RESULTS, "objects")] = ()
    constraints: Annotated[tuple[_Constraint, ...], _list_of(MAX_RESULTS, "objects")] = ()


@dataclass(frozen=True, slots=True)
class _Spec(_Object):
    devices: _Wanted = field(default_factory=_Wanted)


@dataclass(frozen=True, slots=True)
class _Claim(_Object):
    metadata: _Meta = field(default_factory=_Meta)
    spec: _Spec = field(default_factory=_Spec)
    status: _Status = field(default_factory=_Status)


_CLAIM = TypeAdapter(_Claim)


def ours(document: Any, ref: ClaimRef, driver: str, pool: str) -> Allocation:
    """Read what a claim has of our driver's.

    Raises ClaimInvalid if it is another claim by now, is not allocated, has nothing of ours or something of another
    node's pool, and for whatever is no claim.
    """
    try:
        return _read(checked(_CLAIM, document), ref, driver, pool)
    except RequestInvalid as error:
        raise ClaimInvalid(f"claim {ref}: {error}") from error


def results_of(document: Any) -> tuple[Result, ...]:
    """List what a claim has got, of any driver; nothing if it is not allocated. Raises ClaimInvalid."""
    try:
        allocation = checked(_CLAIM, document).status.allocation
    except RequestInvalid as error:
        raise ClaimInvalid(str(error)) from error
    return allocation.devices.results if allocation is not None else ()


def _read(claim: _Claim, ref: ClaimRef, driver: str, pool: str) -> Allocation:
    meta, status = claim.metadata, claim.status
    if meta.uid != ref.uid:
        raise RequestInvalid(f"has the UID {meta.uid!r}, not {ref.uid!r}: it was deleted and made again")
    if status.allocation is None:
        raise RequestInvalid("is not allocated")
    devices = status.allocation.devices
    mine = tuple(result for result in devices.results if result.driver == driver)
    if not mine:
        raise RequestInvalid(f"has no device of the driver {driver}")
    for result in mine:
        if result.pool != pool:
            raise RequestInvalid(f"request {result.request} has a device of pool {result.pool!r}, not of {pool!r}")
    keys = [(result.base, result.device, result.share_id) for result in mine]
    for key in keys:
        if keys.count(key) > 1:
            raise RequestInvalid(f"request {key[0]} has {key[1]} twice")
    configs = [
        Opaque(each.opaque.parameters, each.requests, each.source == "FromClass")
        for each in devices.config
        if each.opaque.driver == driver
    ]
    is_extended = meta.annotations.get(EXTENDED) == "true"
    pods = tuple(PodRef(ref.namespace, each.name, each.uid) for each in status.reserved_for if each.is_pod)
    owner = _owner(meta, is_extended, pods)
    pod_claim = meta.annotations.get(POD_CLAIM)
    return Allocation(
        ref,
        mine,
        tuple(result for result in devices.results if result.driver != driver),
        tuple(sorted(configs, key=lambda config: not config.from_class)),
        pods,
        frozenset(each.name for each in status.reserved_for if each.is_group),
        owner,
        pod_claim if owner and isinstance(pod_claim, str) and _LABEL.fullmatch(pod_claim) else "",
        is_extended,
        frozenset(_pinned(claim.spec.devices)),
    )


def _pinned(devices: _Wanted) -> Iterator[str]:
    for request in devices.requests:
        if request.exactly.selectors:
            yield request.name
        yield from (f"{request.name}/{way.name}" for way in request.first_available if way.selectors)
    for constraint in devices.constraints:
        yield from constraint.requests or (request.name for request in devices.requests)


def _owner(meta: _Meta, is_extended: bool, pods: Collection[PodRef]) -> str:
    """Find the pod that kubelet lets use a claim that has an owner: as it does, by the controlling reference.

    Who makes a claim may write any pod there. For which pods it is reserved only the control plane says.
    """
    for entry in meta.owner_references:
        if (entry.api_version, entry.kind) == ("v1", "Pod") and (entry.controller or is_extended):
            return entry.uid if any(pod.uid == entry.uid for pod in pods) else ""
    return ""
