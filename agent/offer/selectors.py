"""Which of a node's devices a resource's selector takes.

Owns what a selector may ask of a device, and the answer. What a VF is asked never depends on its
own interface being in the host: while it sits in a pod the VF must stay listed. So its link layer
is its PF's, and its own interface name comes from the ledger when the kernel no longer shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from agent.config import PfSelector, Resource, Select, SriovPool
from agent.model.device import Gpu, LinkLayer, PciDevice, RdmaDevice, Snapshot, cpu_list, is_accelerator

INFINIBAND_CLASS = 0x0207
ACCELERATOR_CLASS = 0x12
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
    pkeys: frozenset[int] = frozenset()

    @property
    def parts(self) -> frozenset[str]:
        """What of the node it is: two candidates that have a part in common are one device for two purposes.

        An HCA is its RDMA device, a VF or whole adapter also its PCI function. So a PF's HCA has nothing in common with
        its VFs, but with the PF as a whole adapter.
        """
        if self.rdma is not None:
            return frozenset({f"{self.device} {self.rdma.name}"})
        return frozenset({self.device, *(f"{self.device} {name}" for name in self.rdma_names)})

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
        adapters = (d for d in snapshot.devices if not d.is_vf and not is_accelerator(d))
        yield from (_hca(d, r) for d in adapters for r in d.rdma_devices if not r.absent)
    elif kind == "vf":
        yield from (_function(d, snapshot, host_names) for d in snapshot.devices if _is_spare_vf(d, snapshot))
    elif kind == "nic":
        yield from (_function(d, snapshot, host_names) for d in snapshot.devices if _is_whole_adapter(d, snapshot))
    elif kind == "accelerator":
        yield from (
            _function(d, snapshot, host_names) for d in snapshot.devices if d.pci_class >> 16 == ACCELERATOR_CLASS
        )


def offered_candidates(
    resource: Resource, kind: str, snapshot: Snapshot, host_names: Mapping[str, str] = NO_NAMES
) -> Iterator[tuple[str, Candidate]]:
    """List what a resource could take as this kind, selectors aside, with the kind that each is."""
    found, kept = _of_kind(resource, kind, snapshot, host_names), resource.protected
    return ((each, c) for each, c in found if c.netdevs.isdisjoint(kept) and c.device not in kept) if kept else found


def _of_kind(
    resource: Resource, kind: str, snapshot: Snapshot, host_names: Mapping[str, str]
) -> Iterator[tuple[str, Candidate]]:
    if isinstance(resource.compat, SriovPool) and kind != "accelerator":
        kinds: tuple[str, ...] = ("vf", "nic")
    elif resource.compat is not None and kind == "hca":
        yield from (("hca", _hca(d, r)) for d in snapshot.devices if d.is_network for r in d.rdma_devices)
        return
    else:
        kinds = (kind,)
    for each in kinds:
        for candidate in candidates(each, snapshot, host_names):
            # sriov-network-device-plugin leaves devices out that no driver is bound to.
            if resource.compat is None or (candidate.pci is not None and candidate.pci.driver):
                yield each, candidate


@dataclass(frozen=True, slots=True)
class Condition:
    """One entry of one selector field."""

    field: str
    """Path below `select`, such as `pf[0]`."""
    text: str
    holds: Callable[[Candidate], bool]


def conditions(select: Select) -> tuple[tuple[Condition, ...], ...]:
    """Spell a selector out: every group needs one condition that holds. Empty fields make no group."""
    return (*_own_conditions(select), *_alternatives(select))


def choice(select: Select, candidate: Candidate) -> int | None:
    """Tell which of a selector's alternatives takes the device, 0 if it has none; None if it does not take it."""
    return choosing(select)(candidate)


def choosing(select: Select) -> Callable[[Candidate], int | None]:
    """Return `choice` for one selector, spelled out once for all the devices of a node."""
    groups, others = _own_conditions(select), [choosing(other) for other in select.any_of]

    def choose(candidate: Candidate) -> int | None:
        if not takes(groups, candidate):
            return None
        if not others:
            return 0
        return next((i for i, other in enumerate(others) if other(candidate) is not None), None)

    return choose


def alternative(select: Select, number: int) -> Select:
    """Return the alternative of that number; the selector itself if it has none."""
    return select.any_of[number] if select.any_of else select


def asks_for_names(resource: Resource) -> bool:
    """Tell whether a selector asks for the name of an interface, which only the books know of a device in a pod."""
    selects = (resource.select, resource.nic.select)
    return any(each.netdevs for select in selects for each in (select, *select.any_of))


def _alternatives(select: Select) -> tuple[tuple[Condition, ...], ...]:
    spelled = [conditions(other) for other in select.any_of]
    group = tuple(
        Condition(f"[{i}]", _in_words(groups) or "anything", partial(takes, groups)) for i, groups in enumerate(spelled)
    )
    return (group,) if group else ()


def _in_words(groups: tuple[tuple[Condition, ...], ...]) -> str:
    fields = ((group[0].field.partition("[")[0], [condition.text for condition in group]) for group in groups)
    return "; ".join(f"{field} {', '.join(texts)}" if any(texts) else field for field, texts in fields)


def _own_conditions(select: Select) -> tuple[tuple[Condition, ...], ...]:
    groups = (
        _group("vendors", select.vendors, _hex, _says),
        _group("devices", select.devices, _hex, _says),
        _group("classes", select.classes, str, _is_of_class),
        _group("drivers", select.drivers, str, _says),
        _group("pciAddresses", select.pci_addresses, str, _says),
        _group("acpiIndexes", select.acpi_indexes, str, _says),
        _group("pf", select.pf, _pf_text, _is_of_pf),
        _group("rootDevices", select.root_devices, _pf_text, _is_of_root),
        _group("netdevs", select.netdevs, str, _says),
        _group("rdmaDevices", select.rdma_devices, str, _says),
        _group("linkLayer", select.link_layers, _link_layer_text, _says),
        _group("pKeys", select.pkeys, _pkey_text, _says),
        _group("isRdma", (True,) if select.is_rdma else (), str, _is_rdma),
        _group("vdpaType", (select.vdpa_type,) if select.vdpa_type else (), str, _has_vdpa),
    )
    return tuple(group for group in groups if group)


def takes(groups: tuple[tuple[Condition, ...], ...], candidate: Candidate) -> bool:
    """Tell whether a spelled-out selector takes the device."""
    return all(any(condition.holds(candidate) for condition in group) for group in groups)


def refusing(groups: tuple[tuple[Condition, ...], ...], candidate: Candidate) -> tuple[str, ...]:
    """List the fields of a spelled-out selector that refuse the device; an empty one stands for its alternatives."""
    return tuple(group[0].field.partition("[")[0] for group in groups if not takes((group,), candidate))


def takes_vfs_of(select: Select, pf: Candidate) -> bool:
    """Tell whether a selector for VFs would take VFs of an adapter that has none, as far as the adapter shows it."""
    names, groups = {name.lower() for name in pf.pf_names}, _own_conditions(select)
    of_both = tuple(group for group in groups if group[0].field.partition("[")[0] in ("vendors", "linkLayer"))
    named = all(not each or any(s.pf.lower() in names for s in each) for each in (select.pf, select.root_devices))
    others = select.any_of
    if select.is_rdma and not pf.rdma_names:
        return False
    return named and takes(of_both, pf) and (not others or any(takes_vfs_of(other, pf) for other in others))


def candidate_of(device: PciDevice, snapshot: Snapshot) -> Candidate:
    """Describe an adapter, VF or accelerator as a candidate, whether or not it can be one."""
    return _function(device, snapshot, NO_NAMES)


def _group(
    name: str, values: tuple[V, ...], text: Callable[[V], str], holds: Callable[[str, V, Candidate], bool]
) -> tuple[Condition, ...]:
    if values == (True,):
        return (Condition(name, "", partial(holds, name, values[0])),)
    return tuple(Condition(f"{name}[{i}]", text(v), partial(holds, name, v)) for i, v in enumerate(values))


def _says(field: str, value: object, candidate: Candidate) -> bool:
    """Tell whether a device has a value among those that a field asks for."""
    pci = candidate.pci
    match field:
        case "netdevs":
            return value in candidate.netdevs
        case "rdmaDevices":
            return value in candidate.rdma_names
        case "linkLayer":
            return value in candidate.link_layers
        case "pKeys":
            return value in candidate.pkeys
        case _ if pci is None:
            return False
        case "vendors":
            return pci.vendor == value
        case "devices":
            return pci.device == value
        case "drivers":
            return pci.driver == value
        case "pciAddresses":
            return pci.address == value
        case "acpiIndexes":
            return pci.acpi_index == value
    raise AssertionError(field)


def _is_of_class(_field: str, prefix: str, candidate: Candidate) -> bool:
    return candidate.pci is not None and f"{candidate.pci.pci_class:06x}".startswith(prefix)


def _is_rdma(_field: str, _value: bool, candidate: Candidate) -> bool:
    return bool(candidate.rdma_names)


def _hex(value: int) -> str:
    return f"{value:04x}"


def _link_layer_text(value: LinkLayer) -> str:
    return value.value


def _pkey_text(value: int) -> str:
    return f"0x{value:04x}"


def _pf_text(selector: PfSelector) -> str:
    if selector.vf_indices is None:
        return selector.pf
    return f"{selector.pf}#{cpu_list(selector.vf_indices)}"


def _is_of_pf(_field: str, selector: PfSelector, candidate: Candidate) -> bool:
    return _is_named(selector, candidate.pf_names, candidate)


def _is_of_root(_field: str, selector: PfSelector, candidate: Candidate) -> bool:
    if candidate.pci is None:
        return False
    return _is_named(selector, {candidate.pci.physfn or candidate.pci.address}, candidate)


def _is_named(selector: PfSelector, names: Collection[str], candidate: Candidate) -> bool:
    return candidate.pci is not None and selector.takes(names, candidate.pci.vf_index)


def _has_vdpa(_field: str, vdpa_type: str, candidate: Candidate) -> bool:
    vdpa = candidate.pci.vdpa if candidate.pci is not None else None
    return vdpa is not None and vdpa.vdpa_type == vdpa_type


def may_be_nic(address: str, snapshot: Snapshot) -> bool:
    """Tell whether a device is an adapter or a VF of one. What is not on the node may have been."""
    device = snapshot.by_address.get(address)
    return device is None or device.is_network


def _is_whole_adapter(device: PciDevice, snapshot: Snapshot) -> bool:
    """Tell whether the whole function can go into a pod: it has no VFs that others use, and the host can spare it."""
    return not (device.is_vf or device.vfs) and device.is_network and not snapshot.is_needed(device)


def _is_spare_vf(device: PciDevice, snapshot: Snapshot) -> bool:
    """Tell whether ADD may take a VF: one that the host itself uses, it refuses."""
    return device.is_vf and device.is_network and not snapshot.is_needed(device)


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
    if not device.is_network:
        return frozenset()
    return frozenset({LinkLayer.INFINIBAND if device.pci_class >> 8 == INFINIBAND_CLASS else LinkLayer.ETHERNET})


def _function(device: PciDevice, snapshot: Snapshot, host_names: Mapping[str, str]) -> Candidate:
    pf = snapshot.parent(device)
    host_name = host_names.get(device.address)
    netdevs = _own_netdevs(device) | (frozenset({host_name}) if host_name else frozenset())
    return Candidate(
        device=device.address,
        pci=device,
        pf_names=frozenset({device.physfn or device.address}) | (_own_netdevs(pf) if pf else netdevs),
        netdevs=netdevs,
        rdma_names=frozenset(r.name for r in device.rdma_devices),
        link_layers=_link_layers(pf or device),
        pkeys=_pkeys(device.rdma_devices),
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
        pkeys=_pkeys((rdma,)),
    )


def _pkeys(rdma_devices: Iterable[RdmaDevice]) -> frozenset[int]:
    return frozenset(port.pkey for rdma in rdma_devices for port in rdma.ports[:1] if port.pkey is not None)


def _gpu(gpu: Gpu, snapshot: Snapshot) -> Candidate:
    return Candidate(device=gpu.uuid, pci=snapshot.by_address.get(gpu.pci_address))
