"""What of a configuration comes to less on this node than was meant. Pure.

None of it keeps an agent from its work: one file may be for nodes of several kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agent.config import Config, Resource
from agent.config.template import templates_in, words_of
from agent.model.device import is_pci_address
from agent.model.listed import adapter_name, some
from agent.model.vf_identity import RailKey
from agent.offer.absent import MOST_LISTED, absent, near_first
from agent.offer.assignment import assign
from agent.offer.joining import planes_joined
from agent.offer.offer import Offer
from agent.offer.rails import NamedRails, split_apart

SEE_NVML = (
    "let the agent see libnvidia-ml.so.1 (nvidia.enabled of the chart), or, with GPUs of another vendor, take NICs of"
    " kind vf or nic with binding: late"
)
SEE_DRIVER = "load their driver, and let the agent see libnvidia-ml.so.1 (nvidia.enabled of the chart)"
LIST_RAILS = "list all adapters under topology.rails for other numbers, those of one rail as a list of its planes"
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
        yield from (Caution(f"resources[{i}].{where}", *told) for where, *told in absent(resource, offer.snapshot))
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
    network = config.network_of(resource.name)
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
    if named or not taken:
        return
    kept = [rail.device for rail in offer.rails if rail.device in devices and devices[rail.device].rdma_devices]
    if untaken := [device for device in kept if device not in taken]:
        text = f"no resource takes {_names(untaken, offer)}, whose rail numbers are kept all the same"
        yield Caution("topology.rails", text, LIST_RAILS)
    for group in split_apart(offer.rails, offer.snapshot, offer.distances)[:1]:
        names = _names([rail.device for rail in group], offer)
        text = f"{names} are planes of one adapter, and keep the rail numbers that each of them had"
        yield Caution("topology.rails", text, LIST_RAILS)


def _path(key: RailKey, named: NamedRails) -> str:
    number, plane = key
    return f"topology.rails[{number}]" + (f"[{plane}]" if len(named[number]) > 1 else "")


def _names(devices: Sequence[str], offer: Offer) -> str:
    return some([adapter_name(offer.snapshot.by_address[device]) for device in devices])
