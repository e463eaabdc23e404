"""Offer → devices → the node's ResourceSlices, which are what the scheduler chooses from. Pure.

Bound early, a device is a VF, an adapter, or an HCA with its shares as capacity. Bound late, it is a place: all
devices of a resource with the same nearest GPU, with their number as capacity; which of them a claim gets is chosen on
the node. Places keep the scheduler's search short: claims that do not fit any more must not hold up the others. Where
there are few of them each is divided into parts, for a request of several devices takes a different one for each. A
place has no PCI address of its own, so it can carry its GPU's, by which any GPU driver's devices can be matched.

The same goes for the GPU that an early device names to be matched by (`dra.aliases`): one device a GPU, and the last
one, since the scheduler takes the first that fits and would give it to claims that do not ask for GPUs.

A device names the GPU that it is nearest to, among the devices of its resource. The VFs of a port that is nearest to
several GPUs take turns; whole adapters, of which a GPU may have one only, are matched exactly.

Slices are divided in the same way whatever becomes of the devices' health: a taint that came would otherwise move
devices, and have all slices written again. Generation, owner and when taints began are the publisher's.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent.config import Config, Resource
from agent.model.allocation import PLACE
from agent.model.device import NO_NUMA_NODE
from agent.model.health import HEALTHY, Health, Reason
from agent.offer.offer import Offer, Unit
from agent.offer.rails import nearest
from agent.placement import Distances
from agent.placement.nics import assign
from deviceplugin.dra.attributes import (
    BUS_ID,
    MULTUS,
    UUID,
    Attributes,
    Facts,
    attributes_of,
    common,
    gpu_alias,
    numa_aliases,
    text,
)

UNITS, SHARES = "units", "shares"
"""What is consumed of a place of VFs or whole adapters, and of shared adapters; qualified with the driver's domain."""
MAX_SHORT = 30
"""Length of a resource's name in that of a place, which is a DNS label with a number at the end."""
AT_ONCE = 8
"""So many devices of a late-bound resource can one request ask for on any node that has them."""


@dataclass(frozen=True, slots=True)
class Taint:
    """Why a device is not to be had. When it began is the publisher's to keep."""

    key: str
    effect: str


@dataclass(frozen=True, slots=True)
class DraDevice:
    """One device of a ResourceSlice, and what stands behind it."""

    name: str
    resource_name: str
    attributes: Attributes
    """In the API's form: name → `{"string": …}`, `{"int": …}` and so on."""
    capacity: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """In the API's form."""
    allow_multiple: bool = False
    """Several claims may have a part of it: its capacity."""
    taints: tuple[Taint, ...] = ()
    units: tuple[Unit, ...] = ()
    """What stands behind it: one unit, or all of a place."""
    adapter: str = ""
    """PCI address of the port that it hangs on; empty for a place with several."""

    @property
    def health(self) -> Health:
        """One healthy unit is enough; else the first of them tells why not."""
        if not self.units or any(unit.health.healthy for unit in self.units):
            return HEALTHY
        return self.units[0].health


def devices_of(config: Config, offer: Offer, facts: Facts) -> tuple[DraDevice, ...]:
    """List all devices, those of a resource in the order in which the scheduler is to try them.

    What pods still have by grants of kubelet's (`offer.granted`) is left out, or subtracted from capacity. A device
    that is gone is left out, too, unless a pod has it. Equal arguments give equal lists.
    """
    shorts = _short_names([resource.name for resource in config.claimable])
    found: list[DraDevice] = []
    for resource in config.claimable:
        maker = _Maker(config, offer, facts, resource, shorts[resource.name])
        found += maker.places() if resource.binding == "late" else maker.single()
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Member:
    """A unit with what is known of the device behind it."""

    unit: Unit
    attributes: dict[str, Mapping[str, Any]]
    port: str
    gpus: tuple[str, ...]
    """The GPU that it names, or all that it is nearest to."""
    room: int
    """How many claims it is for: what no pod has by a grant."""


class _Maker:
    """Makes the devices of one resource."""

    def __init__(self, config: Config, offer: Offer, facts: Facts, resource: Resource, short: str) -> None:
        self._config = config
        self._resource = resource
        self._short = short
        self._distances = facts.stable.distances
        self._gpus = facts.stable.snapshot.gpu_by_uuid
        units = [unit for unit in offer.claimable.get(resource.name, ()) if _is_here(unit, offer)]
        known = facts.stable.snapshot.by_address
        units = sorted(
            (u for u in units if u.device in known), key=lambda u: (self._distances.order(u.device), u.unit_id)
        )
        pairing = pair_up([unit.device for unit in units], self._distances)
        self._members = [member for unit in units for member in self._members_of(unit, pairing, offer, facts)]

    def single(self) -> list[DraDevice]:
        """Make a device for each VF or adapter."""
        telling = self._matched_units()
        quiet = [m for m in self._members if m.unit.unit_id not in telling]
        loud = [m for m in self._members if m.unit.unit_id in telling]
        found: list[DraDevice] = []
        for member in (*quiet, *loud):
            if not member.room:
                continue
            alias = gpu_alias(self._config.dra, member.gpus) if member in loud else {}
            device = DraDevice(
                name=_label(member.unit.unit_id if self._shared else f"{self._resource.kind}-{member.unit.device}"),
                resource_name=self._resource.name,
                attributes={**member.attributes, **alias},
                units=(member.unit,),
                adapter=member.port,
            )
            found += self._consumed(device, SHARES, member.room) if self._shared else [self._tainted(device)]
        return found

    def places(self) -> list[DraDevice]:
        """Make a device for each place, those near GPUs first, in the driver's order of these.

        A GPU's place is named by its PCI address, which is known without its driver: claims hold places by name.
        """
        members: dict[tuple[str, str], list[_Member]] = {}
        for member in self._members:
            members.setdefault(self._place_of(member), []).append(member)
        found: list[DraDevice] = []
        names = {gpu: f"gpu-{_label(known.pci_address)}" for gpu, known in self._gpus.items()}
        parts = -(-AT_ONCE // max(1, len(members)))
        order = {gpu: rank for rank, gpu in enumerate(self._distances.gpus)}
        for kind, what in sorted(members, key=lambda place: (order.get(place[1], len(order)), place)):
            here = members[kind, what]
            # What is withheld until it is clean no claim has, and kubelet tries again for whom it was counted in after
            # more than a minute only. Other ills pass, or may be of a device that a pod has and that is counted there.
            able = [m for m in here if m.unit.health.reason != Reason.QUARANTINED] or here
            room = sum(member.room for member in able)
            if not room:
                continue
            device = DraDevice(
                name=f"{PLACE}{self._short}-{names[what] if kind == 'gpu' else _label(what)}",
                resource_name=self._resource.name,
                attributes={
                    **common([member.attributes for member in here]),
                    "kind": {"string": "slots"},
                    **(gpu_alias(self._config.dra, [what], self._gpus[what].pci_address) if kind == "gpu" else {}),
                },
                units=tuple(member.unit for member in here if member.room),
                adapter=here[0].port if len({member.port for member in here}) == 1 else "",
            )
            # A part stays while devices are withheld, for claims have it by its name. Grants only ever end.
            most = len({member.unit.device for member in here if member.room})
            found += self._parts(device, room, min(parts, most), sum(member.room for member in here) - room)
        # Those by which GPUs are matched come last: a claim that does not ask for GPUs takes the first that fits.
        ordered = sorted(found, key=lambda device: not self._gpu_aliases.isdisjoint(device.attributes))
        # Multus asks a device of the slice what to name to the plugin. ADD finds by the place's name what was chosen.
        return ordered if self._shared else [_named_for_multus(device) for device in ordered]

    def _parts(self, device: DraDevice, room: int, count: int, quarantined: int) -> list[DraDevice]:
        """Divide a place. The part that has its name tells of its GPU. A part with no room left is withheld whole."""
        what = SHARES if self._shared else UNITS
        if self._config.dra.shares != "capacity":
            spare = [replace(device, name=f"{device.name}-{room + n}") for n in range(quarantined)]
            return [*map(self._unavailable, spare), *self._consumed(device, what, room)]
        quiet = self._without_gpu(device)
        found = self._consumed(device, what, (room + count - 1) // count)
        for number in range(1, count):
            part = replace(quiet, name=f"{device.name}-{number}")
            left = (room + count - 1 - number) // count
            # The API knows no capacity of which nothing can be had.
            found += self._consumed(part, what, left) if left else map(self._unavailable, self._consumed(part, what, 1))
        return found

    def _without_gpu(self, device: DraDevice) -> DraDevice:
        told = {name: value for name, value in device.attributes.items() if name not in self._gpu_aliases}
        return replace(device, attributes=told)

    @property
    def _gpu_aliases(self) -> frozenset[str]:
        """Name the attributes by which GPUs are matched. The PCI address of what is bound early is its own."""
        what = (UUID, BUS_ID) if self._resource.binding == "late" else (UUID,)
        return frozenset(name for name in self._config.dra.aliases if name.rpartition("/")[2] in what)

    @property
    def _shared(self) -> bool:
        return self._resource.kind == "hca"

    def _members_of(self, unit: Unit, pairing: Pairing, offer: Offer, facts: Facts) -> Iterator[_Member]:
        """Tell what a unit is for. Bound late, an adapter's shares are divided among all GPUs that it is nearest to."""
        dra, is_late = self._config.dra, self._resource.binding == "late"
        attributes = attributes_of(self._resource, unit, facts.stable.snapshot.by_address[unit.device], facts)
        attributes |= numa_aliases(dra, attributes)
        has = self._resource.shares if self._shared else 1
        room = max(0, has - offer.granted.get(unit.device, 0))
        near = pairing.near.get(unit.device, ())
        named = near if self._shared and is_late else tuple(filter(None, (pairing.gpu.get(unit.device),)))
        port = self._distances.port(unit.device)
        for number, gpu in enumerate(named or ("",)):
            told = attributes | {name: value for name, value in (("nearGpu", text(gpu)),) if value is not None}
            gpus = near if self._shared and dra.list_attributes and not is_late else (gpu,) if gpu else ()
            count = len(named) or 1
            yield _Member(unit, told, port, gpus, (room + count - 1 - number) // count)

    def _matched_units(self) -> frozenset[str]:
        """Choose the device that each GPU is matched by: the last one, an ill one only if all are."""
        chosen: dict[str, _Member] = {}
        for member in self._members:
            for gpu in member.gpus:
                if member.room and (
                    gpu not in chosen or member.unit.health.healthy or not chosen[gpu].unit.health.healthy
                ):
                    chosen[gpu] = member
        return frozenset(member.unit.unit_id for member in chosen.values())

    def _place_of(self, member: _Member) -> tuple[str, str]:
        """Tell where a unit is: near a GPU; else, on a node with GPUs, at its adapter; else on its NUMA node."""
        near = member.attributes.get("nearGpu")
        if near is not None:
            return "gpu", str(near["string"])
        numa_node = self._distances.numa_node(member.port)
        if self._distances.gpus or numa_node == NO_NUMA_NODE:
            return "adapter", member.port
        return "numa", f"numa-{numa_node}"

    def _consumed(self, device: DraDevice, what: str, room: int) -> list[DraDevice]:
        """Offer a device to so many claims: by capacity, or as that many devices, of which the last names the GPU."""
        device = self._tainted(device)
        dra = self._config.dra
        if dra.shares == "capacity":
            # A claim's result on a place is one device: no more is to be had at a time than one unit, or one's shares.
            most = min(room, self._resource.shares) if what == SHARES else 1
            bounds = {"min": "1"} | ({"max": str(most)} if most < room or most == 1 else {})
            bounds |= {"step": "1"} if most > 1 else {}
            policy = {"default": "1", "validRange": bounds}
            capacity = {f"{dra.driver}/{what}": {"value": str(room), "requestPolicy": policy}}
            return [replace(device, capacity=capacity, allow_multiple=True)]
        quiet = self._without_gpu(device)
        return [replace(quiet if n < room - 1 else device, name=f"{device.name}-{n}") for n in range(room)]

    def _unavailable(self, device: DraDevice) -> DraDevice:
        taint = Taint(f"{self._config.dra.driver}/{Reason.QUARANTINED}", "NoSchedule")
        return replace(self._without_gpu(device), taints=device.taints or (taint,))

    def _tainted(self, device: DraDevice) -> DraDevice:
        health = device.health
        if health.healthy:
            return device
        # Eviction ends every pod that has a part of the device, so each of its units must be ill enough.
        evicts = all(unit.health.reason in self._config.health.evict for unit in device.units)
        effect = "NoExecute" if evicts else "NoSchedule"
        return replace(device, taints=(Taint(f"{self._config.dra.driver}/{health.reason}", effect),))


def _is_here(unit: Unit, offer: Offer) -> bool:
    return unit.health.reason != Reason.DEVICE_GONE or unit.device in offer.lost


def _named_for_multus(device: DraDevice) -> DraDevice:
    return replace(device, attributes={**device.attributes, f"{MULTUS}/deviceID": {"string": device.name}})


def _label(text: str) -> str:
    """Make a DNS label of a unit's ID or a PCI address: hca-0000:18:00.0 → hca-0000-18-00-0."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Shorten the names of resources to what fits into a label, and no two to one."""
    labels = {name: _label(name) for name in names}
    counts = Counter(labels.values())
    return {
        name: label
        if counts[label] == 1 and len(label) <= MAX_SHORT
        else f"{label[: MAX_SHORT - 9].rstrip('-')}-{_digest(name)}"
        for name, label in labels.items()
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


_ONE_MORE = 1 << 30
"""What a GPU's next adapter costs: more than all that tells adapters apart."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """The GPUs of a resource's devices."""

    gpu: Mapping[str, str] = field(default_factory=dict)
    """Device → the GPU that it names. One that is nearest to none is missing."""
    near: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Device → all GPUs that it is nearest to."""


def pair_up(devices: Sequence[str], distances: Distances) -> Pairing:
    """Pair the devices of one resource, given by PCI address, with GPUs."""
    port_of = {device: distances.port(device) for device in sorted(devices, key=distances.order)}
    near = nearest(sorted(set(port_of.values())), distances)
    by_port: dict[str, list[str]] = {}
    for device, port in port_of.items():
        if port in near:
            by_port.setdefault(port, []).append(device)
    if all(len(mine) == 1 for mine in by_port.values()):
        gpu = _matched(by_port, near, distances)
    else:
        gpu = _in_turns(by_port, near)
    return Pairing(gpu, {device: near[port] for device, port in port_of.items() if port in near})


def _matched(
    by_port: Mapping[str, Sequence[str]], near: Mapping[str, Sequence[str]], distances: Distances
) -> dict[str, str]:
    """Serve as many GPUs as can be, each by as few adapters more than another as can be."""
    ports, gpus = list(by_port), distances.gpus
    costs = [[distances.span(gpu, port) if gpu in near[port] else None for gpu in gpus] for port in ports]
    found = assign(costs, [[_ONE_MORE * i for i in range(len(ports))] for _ in gpus])
    assert found is not None, "each port is near to some GPU, and every GPU has room for all"
    return {by_port[port][0]: gpus[column] for port, column in zip(ports, found, strict=True)}


def _in_turns(by_port: Mapping[str, Sequence[str]], near: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Give the first device of each port to the GPU that has fewest so far, then the second of each, and so on."""
    served: Counter[str] = Counter()
    gpu: dict[str, str] = {}
    for turn in range(max(map(len, by_port.values()), default=0)):
        for port, devices in by_port.items():
            if turn < len(devices):
                chosen = min(near[port], key=served.__getitem__)
                served[chosen] += 1
                gpu[devices[turn]] = chosen
    return gpu


API_VERSION, KIND = "resource.k8s.io/v1", "ResourceSlice"
MAX_DEVICES = 64
"""In one slice. 128 are allowed until one of them has a taint, or an attribute that is a list."""
MAX_NAME = 253
"""Characters of an object's name."""
TAINTS, CAPACITY, LISTS = "taints", "capacity", "listAttributes"
"""What clusters drop that do not have the feature."""
NOTHING: frozenset[str] = frozenset()

Document = Mapping[str, Any]


def slices_of(
    devices: Sequence[DraDevice], driver: str, node_name: str, dropped: Collection[str] = NOTHING
) -> tuple[Document, ...]:
    """Make the slices; none of no devices. Equal arguments give equal documents.

    `dropped` says what the cluster drops of what is written: without taints, devices that are not to be had are left
    out; without capacities, those that several claims have a part of; without lists, the first of each is told.
    """
    packs = _packs([device for device in devices if _is_published(device, dropped)])
    return tuple(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": object_name(index, driver, node_name)},
            "spec": {
                "driver": driver,
                "nodeName": node_name,
                "pool": {"name": node_name, "resourceSliceCount": len(packs)},
                "devices": [_document(device, dropped) for device in pack],
            },
        }
        for index, pack in enumerate(packs)
    )


def object_name(index: int, driver: str, node_name: str) -> str:
    """Name a slice. The scheduler tries slices in the order of their names."""
    name = f"{index:05x}-{driver}-{node_name}"
    if len(name) > MAX_NAME:
        digest = hashlib.sha256(f"{driver}-{node_name}".encode()).hexdigest()[:32]
        name = f"{index:05x}-{digest}"
    return name


def _is_published(device: DraDevice, dropped: Collection[str]) -> bool:
    return not (device.taints and TAINTS in dropped) and not (device.allow_multiple and CAPACITY in dropped)


def _packs(devices: Sequence[DraDevice]) -> list[list[DraDevice]]:
    """Divide devices: all in one slice, by turns of their adapters, or else the slices of each adapter by themselves.

    The scheduler takes the first that fits, and so spreads over adapters where it can; one that fails costs one write.
    """
    by_adapter: dict[str, list[DraDevice]] = {}
    for device in devices:
        by_adapter.setdefault(device.adapter, []).append(device)
    if len(devices) <= MAX_DEVICES:
        return [list(_round_robin(list(by_adapter.values())))] if devices else []
    return [
        mine[start : start + MAX_DEVICES] for mine in by_adapter.values() for start in range(0, len(mine), MAX_DEVICES)
    ]


def _round_robin(lists: Sequence[Sequence[DraDevice]]) -> Iterator[DraDevice]:
    for turn in range(max(map(len, lists), default=0)):
        yield from (devices[turn] for devices in lists if turn < len(devices))


def _document(device: DraDevice, dropped: Collection[str]) -> Document:
    found: dict[str, Any] = {"name": device.name, "attributes": _attributes(device.attributes, dropped)}
    if device.capacity:
        found["capacity"] = device.capacity
    if device.allow_multiple:
        found["allowMultipleAllocations"] = True
    if device.taints:
        found["taints"] = [{"key": taint.key, "effect": taint.effect} for taint in device.taints]
    return found


def _attributes(attributes: Attributes, dropped: Collection[str]) -> Attributes:
    ordered = dict(sorted(attributes.items()))
    if LISTS not in dropped:
        return ordered
    return {name: _first(value) for name, value in ordered.items()}


def _first(value: Mapping[str, Any]) -> Mapping[str, Any]:
    [(form, said)] = value.items()
    return {form.removesuffix("s"): said[0]} if isinstance(said, list) else value
