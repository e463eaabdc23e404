"""What a configuration results in on this node: who has which device and why, what networks become, warnings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

from agent.config import Config, Resource, Select
from agent.config.contradictions import selectors_of
from agent.config.networks import Network
from agent.config.template import Place, filled, problems, templates_in, words_of
from agent.model.device import PciDevice, Snapshot, is_pci_address
from agent.model.printable import adapter_name, some
from agent.model.vf_identity import RailKey
from agent.offer.left_out import LeftOut, left_out, left_out_by
from agent.offer.offer import Offer
from agent.offer.rails import NamedRails
from agent.offer.selection import (
    ACCELERATOR_CLASS,
    Assignment,
    Overlap,
    assign,
    offered_candidates,
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a resource has the devices that it has."""

    resource_name: str
    kind: str
    candidates: tuple[str, ...]
    """Every device of the kind on this node."""
    devices: tuple[str, ...]
    """Those that it gets, without those that make no rail."""
    units: tuple[str, ...]
    """Under which IDs they are offered."""
    left_out: tuple[LeftOut, ...]
    """The devices of the node that it does not offer, by reason."""


@dataclass(frozen=True, slots=True)
class Account:
    """What a whole configuration results in on a node."""

    resources: tuple[Explanation, ...]
    overlaps: tuple[Overlap, ...]
    left_out: tuple[LeftOut, ...]
    """The devices of the node that no resource offers, by reason."""


def explain_all(resources: Sequence[Resource], offer: Offer) -> Account:
    """Tell what each resource finds on this node, and what it gets: `offer` is the plain one of these resources."""
    assignment = assign(resources, offer.snapshot)
    reasons = left_out_by(resources, offer)
    return Account(
        tuple(_explain(each, assignment, offer, reasons.get(each.name, ())) for each in resources),
        assignment.overlaps,
        left_out(resources, offer),
    )


def _explain(resource: Resource, assignment: Assignment, offer: Offer, reasons: tuple[LeftOut, ...]) -> Explanation:
    asked = (offered_candidates(resource, kind, offer.snapshot) for _, kind, _ in selectors_of(resource))
    mine = offer.pools.get(resource.name) or offer.offered[resource.name]
    used = {device for unit in mine for device in (*unit.devices, unit.gpu)}
    taken = [each.candidate for each in assignment.taken[resource.name]]
    return Explanation(
        resource_name=resource.name,
        kind=resource.kind,
        candidates=tuple(candidate.label for found in asked for _, candidate in found),
        devices=tuple(each.label for each in taken if resource.kind != "rail" or each.device in used),
        units=tuple(unit.unit_id for unit in offer.offered[resource.name]),
        left_out=reasons,
    )


def template_problems(config: Config, offer: Offer) -> Iterator[str]:
    """List the templates of networks that give unusable values on this node's own adapters: path and why."""
    for i, network in enumerate(config.networks):
        for where, text in problems(network, places_of(network, config, offer)):
            yield f"networks[{i}]{where and '.'}{where}: {text}"


def places_of(network: Network, config: Config, offer: Offer) -> tuple[Place, ...]:
    """List places of devices that may join a network, one for each that it tells apart. None if it has no templates."""
    found: dict[Place, Place] = {}
    for place in _places(network, config, offer):
        if _fills(place, network):
            found.setdefault(place.only(network.words), place)
    return tuple(found[each] for each in sorted(found, key=_order))


def planes_joined(network: Network, config: Config, offer: Offer) -> Mapping[int, tuple[Place, ...]]:
    """Map each rail of which several planes join a network to a place on each of these planes."""
    found: dict[int, dict[int, Place]] = {}
    for place in _places(network, config, offer):
        if place.rail is not None and place.plane is not None:
            found.setdefault(place.rail, {}).setdefault(place.plane, place)
    return {rail: tuple(mine[plane] for plane in sorted(mine)) for rail, mine in found.items() if len(mine) > 1}


def _order(place: Place) -> tuple[tuple[bool, Any], ...]:
    return tuple((value is not None, value) for value in astuple(place))


def strangers(network: Network, config: Config, offer: Offer) -> tuple[str, ...]:
    """List adapters whose devices cannot join a network, since it asks for what they have not, such as a rail."""
    places = _places(network, config, offer)
    return tuple(sorted({place.adapter for place in places if not _fills(place, network)}))


def texts_at(network: Network, place: Place) -> tuple[tuple[str, Any], ...]:
    """List the texts of a network that are templates, filled in for a place: path and value."""
    return tuple((path, filled(text, place)) for path, text in templates_in(network.keys))


def _places(network: Network, config: Config, offer: Offer) -> tuple[Place, ...]:
    joined = {r.name: config.joined[r.name] for r in config.resources if network.name in r.networks.values()}
    if not network.words or not joined:
        return ()
    sets = {d: unit.devices for mine in offer.units.values() for unit in mine if unit.further for d in unit.devices}
    mine = ((joined[name], device) for device, name in offer.network_devices.items() if name in joined)
    places = ((each, offer.place(device, sets.get(device, ()))) for each, device in mine)
    return tuple(place for each, place in places if each and (to := each.named_for(place)) and to.name == network.name)


def _fills(place: Place, network: Network) -> bool:
    return all(getattr(place, word) not in (None, "") for word in network.words)


SEE_NVML = (
    "let the agent see libnvidia-ml.so.1 (nvidia.enabled of the chart), or, with GPUs of another vendor, take NICs of"
    " kind vf or nic with binding: late"
)
SEE_DRIVER = "load their driver, and let the agent see libnvidia-ml.so.1 (nvidia.enabled of the chart)"
_NVIDIA = 0x10DE
_OF_EACH_PLANE = ("ifName", "subnet", "range", "address")
"""Keys of a network that no two planes of a rail are meant to have alike."""


@dataclass(frozen=True, slots=True)
class Caution:
    """One thing that may surprise."""

    path: str
    """Where it stands in the configuration."""
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}: {self.remedy}"


def cautions(config: Config, offer: Offer) -> Iterator[Caution]:
    """List what may surprise, in the order of the configuration."""
    for i, resource in enumerate(config.resources):
        if resource.kind == "rail" and not offer.snapshot.gpus:
            text = "this node has no GPU that NVML shows, and rails are made of those"
            yield Caution(f"resources[{i}].gpu", text, SEE_NVML)
        if resource.offer == "dra" and (unseen := _without_uuid(offer)):
            text = f"NVML does not show {some(unseen)} here, and no claim can match gpu.nvidia.com/uuid with them"
            yield Caution(f"resources[{i}].offer", text, SEE_DRIVER)
        yield from (Caution(f"resources[{i}].{where}", *rest) for where, *rest in absent(resource, offer.snapshot))
        yield from _of_data_direct(f"resources[{i}]", resource, offer)
        yield from _of_networks(f"resources[{i}].network", resource, config, offer)
    yield from _of_planes(config, offer)
    yield from _of_rails(config, offer)


def _without_uuid(offer: Offer) -> list[str]:
    """List the NVIDIA GPUs that only sysfs shows."""
    addresses = (gpu.pci_address for gpu in offer.snapshot.all_gpus if is_pci_address(gpu.uuid))
    found = (offer.snapshot.by_address.get(address) for address in addresses)
    return [device.address for device in found if device is not None and device.vendor == _NVIDIA]


def _of_data_direct(path: str, resource: Resource, offer: Offer) -> Iterator[Caution]:
    data_direct = offer.snapshot.data_direct
    ports = {offer.distances.port(device) for device, name in offer.network_devices.items() if name == resource.name}
    gpus = offer.distances.gpus
    unknown = sorted(port for port in ports if gpus and not offer.distances.is_known(gpus[0], port))
    if unknown:
        text = f"how near {some(unknown)} is to GPUs is not known here, so no GPU is preferred for it"
        yield Caution(f"{path}.select", text, "see what nodefabric topology and doctor say of Data Direct")
    if data_direct.is_here and "ncclTopo" in resource.environment:
        text = (
            "no topology file is made for NCCL here: this node's adapters have Data Direct functions, which NCCL finds"
        )
        yield Caution(f"{path}.environment", text, "leave ncclTopo out, or keep it for nodes of other kinds")


def _of_networks(path: str, resource: Resource, config: Config, offer: Offer) -> Iterator[Caution]:
    network = config.joined[resource.name]
    places = [offer.place(device) for device, name in offer.network_devices.items() if name == resource.name]
    adapters = {place.adapter: place.pf or place.adapter for place in places}
    if network is not None and network.by_pf:
        known = network.by_pf.keys()
        left_out = sorted(pf for adapter, pf in adapters.items() if known.isdisjoint((adapter, pf)))
        if left_out:
            text = f"has no network for {some(left_out)}, and an ADD with a device of such an adapter fails"
            yield Caution(path, text, "name one for each, or select fewer adapters")
    if resource.bonded and len(adapters) == 1:
        (only,) = adapters.values()
        text = f"{resource.network!r} joins VFs of two PFs, and all that are selected here are of {only}"
        yield Caution(path, text, "select VFs of a second PF, or leave bond out")


def _of_planes(config: Config, offer: Offer) -> Iterator[Caution]:
    """Name the first text of each network that goes by rail and is the same for several planes."""
    for i, network in enumerate(config.networks):
        alike = ((path, text) for path, text in templates_in(network.keys) if _is_alike(path, text))
        path, text = next(alike, ("", ""))
        planes = planes_joined(network, config, offer) if path else {}
        if planes:
            rail = min(planes)
            names = " and ".join(place.pf or place.adapter for place in planes[rail])
            text = f"{text!r} is the same for {names}, which are planes of rail {rail}"
            yield Caution(f"networks[{i}].{path}", text, "add {plane}, so that each plane has its own")


def _is_alike(path: str, text: str) -> bool:
    words = words_of(text)
    return path.rpartition(".")[2] in _OF_EACH_PLANE and "rail" in words and words.isdisjoint(("plane", "pf"))


def _of_rails(config: Config, offer: Offer) -> Iterator[Caution]:
    named, devices = config.topology.rails, offer.snapshot.by_address
    there = {rail.key: rail.device for rail in offer.rails if rail.device in devices}
    listed = [((rail, plane), name) for rail, mine in enumerate(named) for plane, name in enumerate(mine)]
    for key, name in listed:
        path, device = _path(key, named), there.get(key)
        if device is None:
            here = [adapter_name(d) for d in devices.values() if d.rdma_devices and not d.is_vf]
            are = f"; here are {some(near_first(name, here), MOST_LISTED)}" if here else ""
            yield Caution(path, f"no adapter here is called {name}", f"plug the adapter in, or correct its name{are}")
        elif (first := next(other for other in there if there[other] == device)) < key:
            text = f"{name} is the adapter that {named[first[0]][first[1]]} (rail {first[0]}) is"
            yield Caution(path, text, "name each adapter once")
    taken = [a for a in sorted(assign(config.resources, offer.snapshot).adapters) if devices[a].rdma_devices]
    if named and (left_out := [a for a in taken if a not in offer.rail_of]):
        text = f"leaves out {_names(left_out, offer)}, which resources take, so they have no rail"
        yield Caution("topology.rails", text, "list them too, or narrow the selectors")


def _path(key: RailKey, named: NamedRails) -> str:
    number, plane = key
    return f"topology.rails[{number}]" + (f"[{plane}]" if len(named[number]) > 1 else "")


def _names(devices: Sequence[str], offer: Offer) -> str:
    return some([adapter_name(offer.snapshot.by_address[device]) for device in devices])


MOST_LISTED = 8


def absent(resource: Resource, snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """List what a resource names and the node does not have: path in the resource, what is wrong, what is there."""
    for where, kind, select in selectors_of(resource):
        yield from _in_select(where, kind, select, snapshot)
    for where, _ in resource.networks.items():
        if where:
            yield from _missing(f"network{where}", "PF", where[1:], *_pfs(snapshot))


def near_first(name: str, names: Iterable[str]) -> Sequence[str]:
    """Order names by how alike they are: those that begin alike come first."""

    def unlikeness(other: str) -> tuple[float, ...]:
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False)))
        return -alike, -SequenceMatcher(None, name, other).ratio()

    return sorted(sorted(set(names)), key=unlikeness)


def _in_select(path: str, kind: str, select: Select, snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    mine = [d for d in snapshot.devices if _is_of(kind, d)]
    adapters, away = _pfs(snapshot)
    netdevs = [n.name for d in mine for n in d.netdevs if not n.is_representor]
    rdma = [r.name for d in mine for r in d.rdma_devices]
    in_pods = any(r.absent for d in snapshot.devices for r in d.rdma_devices)
    addresses = [g.pci_address for g in snapshot.all_gpus] if kind == "gpu" else [d.address for d in mine]
    for key, what, names, there, may_be_away in (
        ("pf", "PF", [selector.pf for selector in select.pf], adapters, away),
        ("rootDevices", "PF", [selector.pf for selector in select.root_devices], adapters, away),
        ("netdevs", "interface of this kind", select.netdevs, netdevs, any(map(_is_away, mine))),
        ("rdmaDevices", "RDMA device of this kind", select.rdma_devices, rdma, in_pods),
        ("pciAddresses", "device", select.pci_addresses, addresses, False),
    ):
        for i, name in enumerate(names):
            if key != "pciAddresses" or name not in snapshot.by_address:
                yield from _missing(f"{path}.{key}[{i}]", what, name, there, may_be_away)
    for i, other in enumerate(select.any_of):
        yield from _in_select(f"{path}[{i}]", kind, other, snapshot)


def _missing(
    path: str, what: str, name: str, there: Sequence[str], may_be_away: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Say what is missing. A name may be away with an interface or RDMA device that is in a pod; no address is."""
    alike = [each for each in there if is_pci_address(each) == is_pci_address(name.lower())]
    if name.lower() in (each.lower() for each in there) or (may_be_away and not is_pci_address(name.lower())):
        return
    listed = some(near_first(name, alike), MOST_LISTED)
    yield path, f"no {what} here is called {name}", f"here are {listed}" if alike else "there is none at all"


def _pfs(snapshot: Snapshot) -> tuple[Sequence[str], bool]:
    """List the adapters by interface and by address, and tell whether interfaces of some may be in pods."""
    found = [d for d in snapshot.devices if _is_of("nic", d)]
    names = [n.name for d in found for n in d.netdevs if not n.is_representor]
    return [*names, *(d.address for d in found)], any(map(_is_away, found))


def _is_of(kind: str, device: PciDevice) -> bool:
    if kind in ("nic", "hca"):
        return not device.is_vf and (device.is_network or bool(device.netdevs or device.rdma_devices))
    return device.is_vf if kind == "vf" else device.pci_class >> 16 == ACCELERATOR_CLASS


def _is_away(device: PciDevice) -> bool:
    """Tell whether a device lacks the interface that its driver would make for it."""
    lacks = device.driver is not None and not device.netdevs
    return lacks and not (device.is_for_programs or device.is_for_rdma_alone)
