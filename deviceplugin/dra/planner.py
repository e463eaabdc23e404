"""An allocated claim → the rows that stand for it: devices chosen, networks worked out, container edits made.

A request that selects, or that a constraint is about, gets a device of the place that the scheduler has chosen; any
other the nearest to its container's GPUs. Each late-bound result of a claim gets another device.

Asks who has what, and changes nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent.config import Config, Resource
from agent.edits.build import edits_by_device, variables_of_container
from agent.edits.claim_metadata import IN_CONTAINERS, metadata_path, mounted
from agent.edits.specs import KIND_OF_CLAIMS
from agent.errors import AgentError, ClaimInvalid, DeviceGone, NotYet, UnitUnhealthy
from agent.ledger import Ledger
from agent.model.allocation import Claim, ClaimState, Hold, Spec
from agent.model.device import NO_NUMA_NODE, Snapshot
from agent.model.health import Reason, text_of
from agent.model.vf_identity import addresses, identities
from agent.offer.offer import Offer, Unit
from agent.placement import Distances, Group, for_pairs, match_groups, match_nics
from agent.state import Latest
from deviceplugin.dra.allocated_claim import Allocation, Result
from deviceplugin.dra.devices import DraDevice
from deviceplugin.dra.parameters import Setting, settings_of
from deviceplugin.dra.pods import NO_GPUS, GpuAsker, Objects, PodGpus, container_names, container_of, names_all_of

PASSING = frozenset(reason.value for reason in (Reason.LINK_DOWN, Reason.PORT_DOWN))
"""What keeps no pod from its device: a link comes back, and the pod may wait for it."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What is asked of others once for a claim, however often it is planned."""

    gpus: PodGpus = NO_GPUS
    containers: tuple[str, ...] = ()
    """Names of the pod's containers, as requests for extended resources count them."""
    groups: Mapping[str, Hashable] = field(default_factory=dict)
    """Request → what is in one container together."""


class Planner:
    """Plans claims. Methods block, and may be used by many threads at once."""

    def __init__(
        self,
        config: Latest[Config],
        offer: Latest[Offer],
        catalog: Latest[tuple[DraDevice, ...]],
        ledger: Ledger,
        gpus: GpuAsker,
        objects: Objects,
    ) -> None:
        self._config = config
        self._offer = offer
        self._catalog = catalog
        self._ledger = ledger
        self._gpus = gpus
        self._objects = objects
        self.choosing = threading.Lock()
        """Held from a plan until its rows are written: two claims that choose late would choose the same."""

    def ask(self, claim: Allocation) -> PodFacts:
        """Ask others what the plan depends on. What they do not know makes the plan a little worse.

        Raises NotYet as long as this node's own devices are not known, ClaimInvalid if it offers none to claims.
        """
        config = self._config.value
        if not config.claimable:
            raise ClaimInvalid(
                f"claim {claim.ref}: this node offers no resource to claims any more (offer: dra), so recreate the pod"
            )
        if not self._catalog.value:
            raise NotYet("what this node offers is not known yet")
        resources = {resource.name: resource for resource in config.claimable}
        named = {device.name: device.resource_name for device in self._catalog.value}
        mine = [resources[name] for r in claim.results if (name := named.get(r.device)) in resources]
        gpus, containers = NO_GPUS, tuple[str, ...]()
        if any(resource.binding == "late" for resource in mine):
            own = [resource.name for resource in config.resources if resource.kind in ("gpu", "rail")]
            gpus = self._gpus.of(claim, self._offer.value.distances, own)
            if claim.is_extended and len(gpus.by_container) > 1:
                containers = self._containers(claim)
        return PodFacts(gpus, containers, self._groups(claim, mine))

    def plan(self, claim: Allocation, known: PodFacts) -> Claim:
        """Choose devices, and work out all that the rows of a claim say.

        Raises ClaimInvalid, DeviceGone and UnitUnhealthy for what is wrong, NotYet for what may pass.
        """
        config, offer = self._config.value, self._offer.value
        resources = {resource.name: resource for resource in config.claimable}
        listed = {device.name: device for device in self._catalog.value}
        listed |= self._found_again(claim, listed.values(), resources, offer.snapshot)
        found = [(result, *_looked_up(result, listed, resources)) for result in claim.results]
        _check_amounts(claim, found)
        settings = settings_of(claim.configs, [(result, resource) for result, _, resource in found], config)
        units = self._units(claim, found, offer, known)
        planned = [Planned(r, resource, unit) for (r, _, resource), unit in zip(found, units, strict=True)]
        groups = known.groups or {each.result.base: "" for each in planned}
        edits = edits_of(planned, offer.snapshot, groups)
        identity = identities(offer.snapshot)
        devices = []
        for number, (each, setting, edit) in enumerate(zip(planned, settings, edits, strict=True)):
            pci = offer.snapshot.by_address.get(each.unit.device)
            made = _row(claim, number, each, setting)
            if config.dra.metadata:
                host_path = metadata_path(config.cdi_dir, claim.ref.uid, each.result.base)
                edit = mounted(edit, host_path, path_in_containers(claim, each.result.base, each.result.driver))
            devices.append(replace(made, identity=identity(pci) if pci is not None else "", spec=_spec(claim, edit)))
        return Claim(claim.ref, ClaimState.PREPARING, tuple(devices), claim.pods, claim.only_pod)

    # ----------------------------------------------------------------------------------------------- what is asked

    def _containers(self, claim: Allocation) -> tuple[str, ...]:
        try:
            pod = self._objects.pod(claim.pods[0]) if claim.pods else None
            return container_names(pod) if pod is not None else ()
        except AgentError:
            return ()

    def _groups(self, claim: Allocation, resources: Sequence[Resource]) -> Mapping[str, Hashable]:
        """Tell which requests' devices are in one container together.

        The scheduler says it of extended resources, and the pod's object of any claim. That is read where libraries
        are told their devices; else all of a claim's are taken to be together, as most are.
        """
        requests = dict.fromkeys(result.base for result in claim.results)
        if claim.is_extended:
            return {request: container_of(request) for request in requests}
        if len(requests) > 1 and claim.pods and any(resource.environment for resource in resources):
            try:
                pod = self._objects.pod(claim.pods[0])
                is_together = pod is not None and names_all_of(pod, claim.ref.name)
            except AgentError:
                is_together = False
            if not is_together:
                return {request: request for request in requests}
        return dict.fromkeys(requests, "")

    # ---------------------------------------------------------------------------------------------------- devices

    def _found_again(
        self, claim: Allocation, listed: Iterable[DraDevice], resources: Mapping[str, Resource], snapshot: Snapshot
    ) -> Mapping[str, DraDevice]:
        """Map names of devices that a claim had in an earlier boot to what these are now.

        A name is an address, and the scheduler knows the claim's device by that of then. Now another device may have
        it, which is maybe another claim's.
        """
        before = self._ledger.claim(claim.ref.uid)
        if before is None or before.boot_id == self._ledger.boot_id:
            return {}
        early = [d for d in listed if d.resource_name in resources and resources[d.resource_name].binding != "late"]
        there = {unit.device: device for device in early for unit in device.units}
        now = addresses(snapshot)
        return {row.device_name: there[now[row.identity]] for row in before.devices if now.get(row.identity) in there}

    def _units(
        self, claim: Allocation, found: Sequence[tuple[Result, DraDevice, Resource]], offer: Offer, known: PodFacts
    ) -> tuple[Unit, ...]:
        units: dict[int, Unit] = {}
        together: dict[tuple[str, str], list[int]] = {}
        """Results that are to have different devices: all of a resource, or, of shares, those of one request."""
        for number, (result, device, resource) in enumerate(found):
            if resource.binding == "late" and not result.admin:
                together.setdefault((resource.name, result.base if resource.kind == "hca" else ""), []).append(number)
            elif not device.units:
                raise DeviceGone(result.device, "among the devices of this node")
            else:
                units[number] = _usable(result, device.units[0])
        chosen = Counter[str]()
        for numbers in together.values():
            mine = [found[number] for number in numbers]
            for number, unit in zip(numbers, self._late(claim, mine, offer, known, chosen), strict=True):
                units[number] = unit
            for number in numbers:
                chosen[units[number].device] += found[number][0].shares
        return tuple(units[number] for number in range(len(found)))

    def _late(
        self,
        claim: Allocation,
        mine: Sequence[tuple[Result, DraDevice, Resource]],
        offer: Offer,
        known: PodFacts,
        before: Mapping[str, int],
    ) -> Iterator[Unit]:
        """Choose different devices for results of one late-bound resource. `before` counts what was chosen already."""
        resource = mine[0][2]
        # All are of one request, which has one amount of shares, or of devices that are not shared.
        most = resource.shares - mine[0][0].shares if resource.kind == "hca" else 0
        pool = offer.claimable.get(resource.name, ())
        free = {
            unit.device: unit
            for unit in self._free(claim, resource, pool)
            if self._taken(claim, unit.device) + before.get(unit.device, 0) <= most
        }
        # Nobody lets go of a device that nobody has, though it may be left out below.
        others = {unit.device for unit in pool if unit.health.healthy} - free.keys() - before.keys()
        if resource.bonded:
            fit = for_pairs(offer.distances, free, len(mine))
            free = {device: unit for device, unit in free.items() if device in fit}
        wishes = [self._wish(claim, each) for each in mine]
        load = self._load(claim, offer)
        chosen = choose_late(offer.distances, wishes, tuple(free.values()), _near(known), load, spread=resource.spread)
        if chosen is None:
            places = {unit.device for _, device, _ in mine for unit in device.units}
            where = there = ""
            if any(wish.is_pinned for wish in wishes):
                where = " where the scheduler has chosen"
                there = f"{len(places & free.keys())} of {len(places)} there and "
            raise NotYet(
                f"{len(mine)} devices of {resource.name} are wanted{where}, and {there}{len(free)} of {len(pool)} on"
                " this node are free: the others are in use or ill (see nodefabric status)",
                others,
            )
        return (free[device] for device in chosen)

    def _wish(self, claim: Allocation, of: tuple[Result, DraDevice, Resource]) -> LateWish:
        result, device, _ = of
        is_pinned = not claim.is_extended and claim.is_pinned(result)
        container = container_of(result.base) if claim.is_extended else None
        return LateWish(tuple(unit.device for unit in device.units), is_pinned, container)

    def _taken(self, claim: Allocation, device: str) -> int:
        """Count what others have of a device: its shares, or all of it."""
        return sum(hold.shares for hold in self._ledger.holds_on(device) if hold.claim_uid != claim.ref.uid)

    def _free(self, claim: Allocation, resource: Resource, pool: Sequence[Unit]) -> list[Unit]:
        """List the healthy devices that are in no other pod; adapters with shares may be in any."""
        busy = set[str]()
        if resource.kind != "hca":
            own = {pod.uid for pod in claim.pods}
            busy = {row.device for row in self._ledger.attachments() if row.owner.pod.uid not in own}
        return [unit for unit in pool if unit.health.healthy and unit.device not in busy]

    def _load(self, claim: Allocation, offer: Offer) -> Mapping[str, int]:
        claimed = [d.device for c in self._ledger.claims() if c.ref.uid != claim.ref.uid for d in c.devices]
        attached = {row.device for row in self._ledger.attachments()} - set(claimed)
        return Counter(offer.distances.port(device) for device in (*claimed, *attached))


def _looked_up(
    result: Result, listed: Mapping[str, DraDevice], resources: Mapping[str, Resource]
) -> tuple[DraDevice, Resource]:
    device = listed.get(result.device)
    if device is None:
        raise DeviceGone(result.device, f"among what this node offers, though request {result.request} got it")
    if device.resource_name not in resources:
        raise ClaimInvalid(f"{result.device} is of {device.resource_name}, which is not handed out to claims any more")
    return device, resources[device.resource_name]


def _check_amounts(claim: Allocation, found: Sequence[tuple[Result, DraDevice, Resource]]) -> None:
    """Refuse what would have the claim wait for itself: one device twice, or more shares of an adapter than it has.

    Bound late, each result gets a device of its own, which must have as many shares as the result wants.
    """
    together: dict[Hashable, list[Result]] = {}
    for number, (result, device, resource) in enumerate(found):
        if result.admin or not device.units:
            continue
        address = device.units[0].device
        mine = together.setdefault(number if resource.binding == "late" else address, [])
        mine.append(result)
        requests = " and ".join(dict.fromkeys(each.request for each in mine))
        if resource.kind != "hca":
            if len(mine) > 1:
                raise ClaimInvalid(
                    f"claim {claim.ref}: requests {requests} both have {result.device} ({address}), which only one may"
                    " have: it was allocated twice, so delete the claim and its pod"
                )
        elif (shares := sum(each.shares for each in mine)) > resource.shares:
            raise ClaimInvalid(
                f"claim {claim.ref}: {shares} shares of {result.device} were allocated to {requests}, but an adapter of"
                f" {resource.name} has {resource.shares} (shares in its configuration)"
            )


def _usable(result: Result, unit: Unit) -> Unit:
    """Refuse a device that no container could use. One whose link is down may be prepared: that passes.

    A user may want one although it is ill: taints are named by the driver and the reason.
    """
    health = unit.health
    is_tolerated = health.reason in PASSING or f"{result.driver}/{health.reason}" in result.tolerated
    if not (health.healthy or result.admin or is_tolerated):
        raise UnitUnhealthy(f"{result.device} ({unit.device}) cannot be used: {text_of(health.reason)}")
    return unit


def _near(known: PodFacts) -> Mapping[int | None, Sequence[str]]:
    found: dict[int | None, Sequence[str]] = {None: known.gpus.all}
    for number, container in enumerate(known.containers):
        if container in known.gpus.by_container:
            found[number] = known.gpus.by_container[container]
    return found


def _spec(claim: Allocation, edits: Mapping[str, Any]) -> Spec:
    # A runtime refuses a whole spec for one device without edits (CDI's SPEC.md), and its name is told all the same.
    return Spec(KIND_OF_CLAIMS, edits or {"env": [f"NODEFABRIC_CLAIM={claim.ref}"]})


def _row(claim: Allocation, number: int, planned: Planned, setting: Setting) -> Hold:
    result, resource = planned.result, planned.resource
    is_shared = resource.kind == "hca"
    return Hold(
        f"{claim.ref.uid}-{number}-{result.device}",
        resource.name,
        (planned.unit.device,),
        kind=resource.kind,
        claim_uid=claim.ref.uid,
        request=result.base,
        pool=result.pool,
        device_name=result.device,
        share_id=result.share_id,
        exclusive=not (is_shared or result.admin),
        admin=result.admin,
        network=setting.network,
        ifname=setting.ifname,
        shares=result.shares if is_shared else 1,
    )


@dataclass(frozen=True, slots=True)
class Planned:
    """One result, with its device."""

    result: Result
    resource: Resource
    unit: Unit


def edits_of(
    planned: Sequence[Planned], snapshot: Snapshot, group_of: Mapping[str, Hashable]
) -> tuple[Mapping[str, Any], ...]:
    """Work out the containerEdits of each result.

    `group_of` maps each request to what is in one container together: there, variables name all devices. What is only
    looked at (admin access) brings its character devices alone. Raises UnitUnhealthy for a device that lacks what a
    container needs.
    """
    groups: dict[Hashable, list[Planned]] = {}
    for each in planned:
        if not each.result.admin:
            groups.setdefault(group_of[each.result.base], []).append(each)
    found: dict[tuple[Hashable, str], Mapping[str, Mapping[str, Any]]] = {}
    for group, mine in groups.items():
        held: dict[str, tuple[Resource, dict[str, Unit]]] = {}
        for each in mine:
            held.setdefault(each.resource.name, (each.resource, {}))[1][each.unit.device] = each.unit
        variables = variables_of_container([(of, tuple(units.values())) for of, units in held.values()], snapshot)
        for name, (resource, units) in held.items():
            found[group, name] = edits_by_device(resource, tuple(units.values()), snapshot, variables)
    return tuple(
        _nodes_of(each, snapshot)
        if each.result.admin
        else _said(
            {
                **found[group_of[each.result.base], each.resource.name][each.unit.device],
                "mounts": _mounts(each.resource),
            }
        )
        for each in planned
    )


def _nodes_of(each: Planned, snapshot: Snapshot) -> Mapping[str, Any]:
    edits = edits_by_device(each.resource, [each.unit], snapshot)[each.unit.device]
    return {key: value for key, value in edits.items() if key == "deviceNodes"}


def _mounts(resource: Resource) -> list[Mapping[str, Any]]:
    options = ["ro", "bind", "nosuid", "nodev"]
    return [{"hostPath": m.host_path, "containerPath": m.path, "options": options} for m in resource.mounts]


def _said(edits: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what is empty: a runtime refuses edits that change nothing."""
    return {key: value for key, value in edits.items() if value}


@dataclass(frozen=True, slots=True)
class LateWish:
    """One result for which a device is to be chosen."""

    place: tuple[str, ...]
    """PCI addresses of the devices that the scheduler takes for equal."""
    is_pinned: bool
    """Whether it must be one of these."""
    container: int | None = None
    """Number of the container that it is for, if that is known."""


def choose_late(
    distances: Distances,
    wishes: Sequence[LateWish],
    free: Sequence[Unit],
    gpus: Mapping[int | None, Sequence[str]],
    load: Mapping[str, int],
    *,
    spread: bool = True,
) -> tuple[str, ...] | None:
    """Choose from one resource's free devices for all of a claim's wishes of it, in their order; None if too few.

    `gpus` are the UUIDs for each container, under None those of the pod; `load` counts what is in use of a port.
    Without `spread` one port is filled before another.
    """
    nodes = {unit.device: unit.numa_node for unit in free}
    load = Counter(load)
    chosen: dict[int, str] = {}

    def take(wish: int, devices: Collection[str], near: Sequence[str]) -> bool:
        found = match_nics(distances, near, sorted(devices, key=distances.order), 1, load, spread=spread)
        for device in found:
            chosen[wish] = device
            del nodes[device]
            load[distances.port(device)] += 1
        return bool(found)

    for i, wish in enumerate(wishes):
        if wish.is_pinned and not take(i, nodes.keys() & set(wish.place), ()):
            return None
    open_ones = [i for i, wish in enumerate(wishes) if not wish.is_pinned]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i in open_ones:
        container = wishes[i].container
        near = tuple(gpus.get(container, ())) or tuple(gpus.get(None, ()))
        if near:
            # Containers with the same GPUs are one: none of them is nearer to these than another.
            groups.setdefault(near, []).append(i)
    asked = [Group((NO_NUMA_NODE,) * len(members), near) for near, members in groups.items()]
    found = match_groups(distances, asked, nodes, load, spread=spread)
    if found is None:
        return None
    for members, devices in zip(groups.values(), found, strict=True):
        for i, device in zip(members, devices, strict=True):
            chosen[i] = device
            del nodes[device]
            load[distances.port(device)] += 1
    for i in open_ones:
        if i not in chosen and not take(i, nodes.keys() & set(wishes[i].place), ()) and not take(i, nodes.keys(), ()):
            return None
    return tuple(chosen[i] for i in range(len(wishes)))


def path_in_containers(claim: Allocation, request: str, driver: str) -> str:
    """Tell where a container finds the file of a request, by the name that its pod has for the claim."""
    whose = f"resourceclaimtemplates/{claim.pod_claim}" if claim.pod_claim else f"resourceclaims/{claim.ref.name}"
    return f"{IN_CONTAINERS}/{whose}/{request}/{driver}-metadata.json"
