"""A stand-in for the scheduler's choice of devices for claims, on one node.

First fit with backtracking, without any scoring, as `staging/src/k8s.io/dynamic-resource-allocation/structured` of
Kubernetes 1.36 does it: pools by driver and name, slices by object name, devices as listed. What it does not know
(`allocationMode: All`, admin access, counters, distinctAttribute, binding conditions) it refuses.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal
from typing import Any

from agent.model.printable import parse_exact
from hack.sim.cluster.selectable import Document, holds, qualified, tolerated

LIMIT_SECONDS = 10.0
"""The scheduler's own: so long may one node take (DynamicResourcesFilterTimeout)."""
_CHECK_EVERY = 256
_NOTHING = Decimal(0)
EXTENDED = "resource.kubernetes.io/extended-resource-claim"

DeviceId = tuple[str, str, str]
"""Driver, pool, device."""
Amounts = dict[str, Decimal]
Values = frozenset[tuple[str, Any]]
"""An attribute: (type, value); several where it is a list."""


class TooLong(Exception):
    """The limit has passed: the pod fails with an error, and others have waited meanwhile."""


class Unsupported(Exception):
    """The claim asks for something that this stand-in does not know."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A device of a slice."""

    id: DeviceId
    document: Document
    values: Mapping[tuple[str, str], Values]
    """(Domain, name) → what it says."""
    capacity: Mapping[str, Decimal]
    is_shared: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to fulfil a request."""

    name: str
    """`nic`, or `nic/near` for one of several ways."""
    selectors: tuple[str, ...]
    count: int
    amounts: Mapping[str, Decimal]
    """Capacities that it asks for, by the names that are published."""
    tolerations: tuple[Document, ...]


@dataclass
class Match:
    """A `matchAttribute`: what all devices of some requests have in common."""

    name: tuple[str, str]
    requests: frozenset[str]
    common: list[Values] = field(default_factory=list)
    """After each device so far."""

    def covers(self, choice: Choice) -> bool:
        return not self.requests or not self.requests.isdisjoint((choice.name, choice.name.partition("/")[0]))

    def add(self, device: Listed) -> bool:
        """Take a device in, if it has a value in common with those before."""
        mine = device.values.get(self.name)
        if mine is None:
            return False
        if self.common and mine is not self.common[-1]:  # equal ones are the same object
            mine &= self.common[-1]
            if not mine:
                return False
        self.common.append(mine)
        return True


@dataclass
class _Wanted:
    """A claim that is to be allocated."""

    requests: list[list[Choice]]
    matches: list[Match]


class Node:
    """The devices of one node, and who has them."""

    def __init__(
        self,
        name: str,
        slices: Sequence[Document],
        classes: Mapping[str, Document],
        limit: float = LIMIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit` is in seconds."""
        self.devices = tuple(_listed(name, slices))
        self.steps = 0
        """Devices looked at, ever."""
        self.classes = classes
        self._limit = limit
        self._clock = clock
        self._held: dict[str, list[tuple[Listed, Amounts]]] = {}
        """Claim → its devices."""
        self._taken: set[DeviceId] = set()
        self._consumed: dict[DeviceId, Amounts] = {}

    def allocate(self, claims: Mapping[str, Document]) -> Mapping[str, Sequence[Document]] | None:
        """Choose devices for all claims of a pod, given by name: their allocation results; None if they do not fit.

        Raises TooLong, SelectorFailed for a selector without a value, and Unsupported.
        """
        search = _Search(self, [self._wanted(claim) for claim in claims.values()], self._clock() + self._limit)
        if not search.fits(0, 0, None, 0):
            return None
        results: dict[str, list[Document]] = {name: [] for name in claims}
        names = list(claims)
        for number, choice, device, amounts in search.chosen:
            self._held.setdefault(names[number], []).append((device, amounts))
            results[names[number]].append(_result(choice, device, amounts))
        return results

    def release(self, claim: str) -> None:
        """Deallocate a claim."""
        for device, amounts in self._held.pop(claim):
            self.give_back(device, amounts)

    def take(self, device: Listed, amounts: Amounts) -> None:
        """Note that somebody has a device, or a part of it."""
        if device.is_shared:
            used = self._consumed.setdefault(device.id, Amounts())
            used |= {name: used.get(name, _NOTHING) + amount for name, amount in amounts.items()}
        else:
            self._taken.add(device.id)

    def give_back(self, device: Listed, amounts: Amounts) -> None:
        if device.is_shared:
            used = self._consumed[device.id]
            used |= {name: used[name] - amount for name, amount in amounts.items()}
        else:
            self._taken.discard(device.id)

    def has(self, device: Listed, amounts: Amounts) -> bool:
        """Tell whether so much of a device is left."""
        if not device.is_shared:
            return device.id not in self._taken
        used = self._consumed.get(device.id)
        return used is None or all(used[name] + amount <= device.capacity[name] for name, amount in amounts.items())

    def _wanted(self, claim: Document) -> _Wanted:
        asked = claim["spec"]["devices"]
        requests = [[*self._choices(request)] for request in asked["requests"]]
        matches = []
        for constraint in asked.get("constraints", ()):
            if "matchAttribute" not in constraint:
                raise Unsupported(f"constraint {sorted(constraint)}")
            domain, name = qualified(constraint["matchAttribute"], "")
            matches.append(Match((domain, name), frozenset(constraint.get("requests", ()))))
        return _Wanted(requests, matches)

    def _choices(self, request: Document) -> Iterator[Choice]:
        ways = [(request["name"], request["exactly"])] if "exactly" in request else []
        ways += [(f"{request['name']}/{way['name']}", way) for way in request.get("firstAvailable", ())]
        for name, way in ways:
            if way.get("allocationMode", "ExactCount") != "ExactCount" or way.get("adminAccess"):
                raise Unsupported(f"request {name}: {way}")
            selectors = (*self.classes[way["deviceClassName"]]["spec"].get("selectors", ()), *way.get("selectors", ()))
            amounts = way.get("capacity", {}).get("requests", {})
            yield Choice(
                name,
                tuple(selector["cel"]["expression"] for selector in selectors),
                way.get("count", 1),
                {capacity: parse_exact(amount) for capacity, amount in amounts.items()},
                tuple(way.get("tolerations", ())),
            )


class _Search:
    """One attempt to find devices for all claims of a pod."""

    def __init__(self, node: Node, wanted: Sequence[_Wanted], deadline: float) -> None:
        self.chosen: list[tuple[int, Choice, Listed, Amounts]] = []
        self._node = node
        self._wanted = wanted
        self._deadline = deadline
        self._known: dict[tuple[int, str], tuple[list[Amounts | bool | None], list[Match]]] = {}
        """For each claim and choice what it takes of each device, or False, once that was asked; its constraints."""

    def fits(self, claim: int, request: int, choice: Choice | None, number: int) -> bool:
        """Choose what is left, beginning with the `number`-th device of a choice for a request of a claim."""
        if claim == len(self._wanted):
            return True
        wanted = self._wanted[claim]
        if request == len(wanted.requests):
            return self.fits(claim + 1, 0, None, 0)
        if choice is None:
            return any(self.fits(claim, request, way, 0) for way in wanted.requests[request])
        if number == choice.count:
            return self.fits(claim, request + 1, None, 0)
        node, key = self._node, (claim, choice.name)
        if key not in self._known:
            self._known[key] = [None] * len(node.devices), [m for m in wanted.matches if m.covers(choice)]
        known, matches = self._known[key]
        before = {device.id for _, _, device, _ in self.chosen[len(self.chosen) - number :]} if number else ()
        for index, device in enumerate(node.devices):
            node.steps += 1
            if not node.steps % _CHECK_EVERY and node._clock() > self._deadline:
                raise TooLong(f"gave up after {node._limit:g} s")
            amounts = known[index]
            if amounts is None:
                amounts = known[index] = _taken_by(choice, device)
            if amounts is False or device.id in before:
                continue
            assert isinstance(amounts, dict)
            if not node.has(device, amounts):
                continue
            count = 0
            for match in matches:
                if not match.add(device):
                    break
                count += 1
            else:
                node.take(device, amounts)
                self.chosen.append((claim, choice, device, amounts))
                if self._goes_on(claim, request, choice, number + 1, device, amounts):
                    return True
            for match in matches[:count]:
                match.common.pop()
        return False

    def _goes_on(self, claim: int, request: int, choice: Choice, number: int, device: Listed, amounts: Amounts) -> bool:
        """Choose what is left; without a device again if that cannot be, or takes too long."""
        found = False
        try:
            found = self.fits(claim, request, choice, number)
        finally:
            if not found:
                self.chosen.pop()
                self._node.give_back(device, amounts)
        return found


def _taken_by(choice: Choice, device: Listed) -> Amounts | bool:
    """Tell what a choice takes of a device's capacities; False if it may not have the device."""
    if not all(holds(text, device.id[0], device.document) for text in choice.selectors):
        return False
    if not tolerated(device.document.get("taints", ()), choice.tolerations):
        return False
    if not choice.amounts.keys() <= device.capacity.keys():
        return False
    if not device.is_shared:
        return {} if all(device.capacity[name] >= asked for name, asked in choice.amounts.items()) else False
    amounts = Amounts()
    for name, offered in device.document.get("capacity", {}).items():
        amount = consumed(offered, choice.amounts.get(name))
        if amount is None or amount > device.capacity[name]:
            return False
        amounts[name] = amount
    return amounts


def consumed(capacity: Document, asked: Decimal | None) -> Decimal | None:
    """Tell how much of a capacity is taken for so much asked, by its policy; None if it gives no such amount.

    Without a policy, and nothing asked for, all of it is.
    """
    policy = capacity.get("requestPolicy", {})
    amount = asked
    if amount is None:
        amount = parse_exact(policy["default"] if "default" in policy else capacity["value"])
    if "validValues" in policy:
        return min((v for v in map(parse_exact, policy["validValues"]) if v >= amount), default=None)
    if "validRange" in policy:
        bounds = {name: parse_exact(value) for name, value in policy["validRange"].items()}
        amount = max(amount, bounds["min"])
        if "step" in bounds:
            steps = ((amount - bounds["min"]) / bounds["step"]).to_integral_value(ROUND_CEILING)
            amount = bounds["min"] + steps * bounds["step"]
        if amount > bounds.get("max", amount):
            return None
    return amount


def extended_claim(pod: Document, classes: Mapping[str, Document]) -> Document | None:
    """Make the claim that the scheduler makes for a pod's extended resources; None if no class stands for any."""
    by_resource = {
        each["spec"]["extendedResourceName"]: name
        for name, each in sorted(classes.items())
        if "extendedResourceName" in each["spec"]
    }
    requests = []
    spec = pod["spec"]
    for i, container in enumerate((*spec.get("initContainers", ()), *spec["containers"])):
        limits = container.get("resources", {}).get("limits", {})
        mine = sorted((name, int(count)) for name, count in limits.items() if name in by_resource)
        requests += [
            {"name": f"container-{i}-request-{j}", "exactly": {"deviceClassName": by_resource[name], "count": count}}
            for j, (name, count) in enumerate(mine)
        ]
    if not requests:
        return None
    metadata = {"generateName": f"{pod['metadata']['name']}-extended-resources-", "annotations": {EXTENDED: "true"}}
    return {"metadata": metadata, "spec": {"devices": {"requests": requests}}}


def _listed(node_name: str, slices: Sequence[Document]) -> Iterator[Listed]:
    """List the devices in the order in which they are tried: of pools that are whole, their newest generation."""
    pools: dict[tuple[str, str], list[Document]] = {}
    same: dict[Values, Values] = {}
    for one in slices:
        if one["spec"].get("nodeName") == node_name:
            pools.setdefault((one["spec"]["driver"], one["spec"]["pool"]["name"]), []).append(one)
    for (driver, pool), mine in sorted(pools.items(), key=lambda item: item[0]):
        newest = max(one["spec"]["pool"].get("generation", 0) for one in mine)
        mine = [one for one in mine if one["spec"]["pool"].get("generation", 0) == newest]
        if len(mine) != mine[0]["spec"]["pool"]["resourceSliceCount"]:
            continue
        for one in sorted(mine, key=lambda each: str(each["metadata"]["name"])):
            for device in one["spec"].get("devices", ()):
                if device.get("consumesCounters") or device.get("bindingConditions"):
                    raise Unsupported(f"{device['name']}: {sorted(device)}")
                values = {
                    qualified(name, driver): same.setdefault(said := _values(value), said)
                    for name, value in device.get("attributes", {}).items()
                }
                capacity = {name: parse_exact(each["value"]) for name, each in device.get("capacity", {}).items()}
                is_shared = bool(device.get("allowMultipleAllocations"))
                yield Listed((driver, pool, device["name"]), device, values, capacity, is_shared)


def _values(attribute: Mapping[str, Any]) -> Values:
    [(form, value)] = attribute.items()
    if isinstance(value, list):
        return frozenset((form.removesuffix("s"), each) for each in value)
    return frozenset({(form, value)})


def _result(choice: Choice, device: Listed, amounts: Amounts) -> Document:
    driver, pool, name = device.id
    found: dict[str, Any] = {"request": choice.name, "driver": driver, "pool": pool, "device": name}
    if device.is_shared:
        found |= {"shareID": str(uuid.uuid4()), "consumedCapacity": {n: str(amount) for n, amount in amounts.items()}}
    return found
