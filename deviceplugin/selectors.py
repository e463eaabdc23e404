"""Which of a node's devices a resource's selector takes.

Owns what a selector may ask of a device, and the answer. What a VF is asked never depends on its
own interface being in the host: while it sits in a pod the VF must stay listed. So its link layer
is its PF's, and its own interface name comes from the ledger when the kernel no longer shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from agent.config import PfSelector, Select
from agent.model.device import Gpu, LinkLayer, PciDevice, RdmaDevice, Snapshot

NETWORK_CLASS = 0x02
INFINIBAND_CLASS = 0x0207
V = TypeVar("V")
NO_NAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that a resource of one kind could take, with all that selectors may ask of it."""

    device: str
    """PCI address, or the GPU's UUID."""
    pci: PciDevice | None
    """None for a GPU whose PCI device the scan did not see."""
    rdma: RdmaDevice | None = None
    """The HCA itself, for kind hca."""
    pf_names: frozenset[str] = frozenset()
    """Interfaces and PCI address of the PF; of the device itself where it is no VF."""
    netdevs: frozenset[str] = frozenset()
    rdma_names: frozenset[str] = frozenset()
    link_layers: frozenset[LinkLayer] = frozenset()

    @property
    def label(self) -> str:
        """Name the device for people: PCI address and RDMA device, or UUID."""
        return f"{self.device} ({self.rdma.name})" if self.rdma else self.device


def candidates(kind: str, snapshot: Snapshot, host_names: Mapping[str, str] = NO_NAMES) -> Iterator[Candidate]:
    """List the devices that a resource of this kind could take, selectors aside.

    `host_names` tells the interface names, in the host, of devices that now sit in pods.
    """
    if kind == "gpu":
        yield from (_gpu(gpu, snapshot) for gpu in snapshot.gpus)
    elif kind == "hca":
        yield from (_hca(d, r) for d in snapshot.devices if not d.is_vf for r in d.rdma_devices if not r.absent)
    elif kind == "vf":
        for device in snapshot.devices:
            if device.is_vf and device.pci_class >> 16 == NETWORK_CLASS:
                yield _vf(device, snapshot, host_names.get(device.address))


@dataclass(frozen=True, slots=True)
class Condition:
    """One entry of one selector field."""

    field: str
    """Path below `select`, such as `pf[0]`."""
    text: str
    holds: Callable[[Candidate], bool]


def conditions(select: Select) -> tuple[tuple[Condition, ...], ...]:
    """Spell a selector out: every group needs one condition that holds. Empty fields make no group."""
    groups = (
        _group("vendors", select.vendors, _hex, lambda v, c: c.pci is not None and c.pci.vendor == v),
        _group("devices", select.devices, _hex, lambda v, c: c.pci is not None and c.pci.device == v),
        _group("drivers", select.drivers, str, lambda v, c: c.pci is not None and c.pci.driver == v),
        _group("pciAddresses", select.pci_addresses, str, lambda v, c: c.pci is not None and c.pci.address == v),
        _group("pf", select.pf, _pf_text, _is_of_pf),
        _group("netdevs", select.netdevs, str, lambda v, c: v in c.netdevs),
        _group("rdmaDevices", select.rdma_devices, str, lambda v, c: v in c.rdma_names),
        _group("linkLayer", select.link_layers, lambda v: v.value, lambda v, c: v in c.link_layers),
    )
    return tuple(group for group in groups if group)


def takes(groups: tuple[tuple[Condition, ...], ...], candidate: Candidate) -> bool:
    """Tell whether a spelled-out selector takes the device."""
    return all(any(condition.holds(candidate) for condition in group) for group in groups)


def _group(
    name: str, values: tuple[V, ...], text: Callable[[V], str], holds: Callable[[V, Candidate], bool]
) -> tuple[Condition, ...]:
    return tuple(Condition(f"{name}[{i}]", text(v), partial(holds, v)) for i, v in enumerate(values))


def _hex(value: int) -> str:
    return f"{value:04x}"


def _pf_text(selector: PfSelector) -> str:
    if selector.vf_indices is None:
        return selector.pf
    return f"{selector.pf}#{_ranges(sorted(selector.vf_indices))}"


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _is_of_pf(selector: PfSelector, candidate: Candidate) -> bool:
    if selector.pf not in candidate.pf_names or candidate.pci is None:
        return False
    return selector.vf_indices is None or candidate.pci.vf_index in selector.vf_indices


def _own_netdevs(device: PciDevice) -> frozenset[str]:
    return frozenset(n.name for n in device.netdevs if not n.is_representor)


def _link_layers(device: PciDevice) -> frozenset[LinkLayer]:
    """Ports know best; an interface knows; the PCI class is there even with no driver bound."""
    ports = {p.link_layer for r in device.rdma_devices for p in r.ports} - {LinkLayer.UNSPECIFIED}
    if ports:
        return frozenset(ports)
    netdevs = {n.link_layer for n in device.netdevs if not n.is_representor} - {LinkLayer.UNSPECIFIED}
    if netdevs:
        return frozenset(netdevs)
    if device.pci_class >> 16 != NETWORK_CLASS:
        return frozenset()
    return frozenset({LinkLayer.INFINIBAND if device.pci_class >> 8 == INFINIBAND_CLASS else LinkLayer.ETHERNET})


def _vf(device: PciDevice, snapshot: Snapshot, host_name: str | None) -> Candidate:
    pf = snapshot.parent(device)
    return Candidate(
        device=device.address,
        pci=device,
        pf_names=frozenset({device.physfn or ""}) | (_own_netdevs(pf) if pf else frozenset()),
        netdevs=_own_netdevs(device) | (frozenset({host_name}) if host_name else frozenset()),
        rdma_names=frozenset(r.name for r in device.rdma_devices),
        link_layers=_link_layers(pf or device),
    )


def _hca(device: PciDevice, rdma: RdmaDevice) -> Candidate:
    ports = frozenset(p.link_layer for p in rdma.ports) - {LinkLayer.UNSPECIFIED}
    netdevs = _own_netdevs(device)
    return Candidate(
        device=device.address,
        pci=device,
        rdma=rdma,
        pf_names=netdevs | {device.address},
        netdevs=netdevs,
        rdma_names=frozenset({rdma.name}),
        link_layers=ports or _link_layers(device),
    )


def _gpu(gpu: Gpu, snapshot: Snapshot) -> Candidate:
    return Candidate(device=gpu.uuid, pci=snapshot.by_address.get(gpu.pci_address))
