"""What of a configuration comes to less on this node than was meant. Pure.

None of it keeps an agent from its work: one file may be for nodes of several kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent.config import Config, Resource
from agent.model.device import is_pci_address
from agent.model.listed import some
from agent.offer.offer import Offer

SEE_NVML = (
    "let the agent see libnvidia-ml.so.1 (nvidia.enabled of the chart), or, with GPUs of another vendor, take NICs of"
    " kind vf or nic with binding: late"
)
SEE_DRIVER = "load their driver, and let the agent see libnvidia-ml.so.1 (nvidia.enabled of the chart)"
_NVIDIA = 0x10DE


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
        yield from _of_data_direct(f"resources[{i}]", resource, offer)
        yield from _of_networks(f"resources[{i}].network", resource, config, offer)
    yield from _of_rails(config.topology.rails, offer)


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


def _of_rails(named: Sequence[str], offer: Offer) -> Iterator[Caution]:
    there: Mapping[int, str] = {
        rail.number: rail.device for rail in offer.rails if rail.device in offer.snapshot.by_address
    }
    for number, name in enumerate(named):
        path, device = f"topology.rails[{number}]", there.get(number)
        if device is None:
            yield Caution(path, f"no adapter here is called {name}", "plug the adapter in, or correct its name")
        elif (first := next(n for n in there if there[n] == device)) < number:
            text = f"{name} is the adapter that {named[first]} (rail {first}) is"
            yield Caution(path, text, "name each adapter once")
