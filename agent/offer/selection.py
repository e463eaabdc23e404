"""Which devices a resource's selector takes, and which resource each device of the node belongs to.

What a VF is asked never depends on its own interface being in the host: while it sits in a pod the VF must stay listed.
So its link layer is its PF's, and its own interface name comes from the ledger when the kernel no longer shows it.

A physical device serves one resource: the first of the configuration that selects it. Every later one that selects it
too is an overlap. A device that a pod holds stays with the resource that it was handed out under, whatever the
selectors say now: kubelet counts it there, and under another name would give it away a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from agent.config import PfSelector, Resource, Select, SharedPool, SriovPool
from agent.config.contradictions import selectors_of
from agent.config.resources import NETWORK_KINDS
from agent.model.device import Gpu, LinkLayer, PciDevice, RdmaDevice, Snapshot, is_accelerator
from agent.model.printable import grouped

INFINIBAND_CLASS = 0x0207
ACCELERATOR_CLASS = 0x12
NO_NAMES: Mapping[str, str] = MappingProxyType({})


class Why(StrEnum):
    """Why a device is not offered: a word, which is the member itself, with its sentence and what to do.

    The nearest to being offered comes first.
    `{}` stands for what differs: a resource, keys of a selector, a kind, the word of an ill unit.
    """

    text: str
    remedy: str

    def __new__(cls, word: str, text: str, remedy: str) -> Why:
        member = str.__new__(cls, word)
        member._value_ = word
        member.text = text
        member.remedy = remedy
        return member

    UNHEALTHY = (
        "Unhealthy",
        "offered, and unhealthy: {}",
        "mend what the reason names (docs/health.md lists them)",
    )
    NOT_YET = "NotYet", "selected, and about to be listed", "wait a moment"
    NO_NIC = (
        "NoNic",
        "without a NIC for a rail",
        "select more NICs under nic.select, lower nic.count, or raise nic.shares of kind hca",
    )
    NO_GPU = (
        "NoGpu",
        "not needed by any GPU of the rails",
        "raise nic.count, or narrow nic.select and offer the rest by a resource of its own",
    )
    NO_GPU_HERE = (
        "NoGpuHere",
        "selected for rails, which need GPUs that NVML shows, and this node has none",
        "let the agent see libnvidia-ml.so.1 (nvidia.enabled of the chart), or take kind vf or nic with binding: late",
    )
    TOO_FEW = (
        "TooFew",
        "too few for the rail of another GPU",
        "lower nic.count, or select more NICs under nic.select",
    )
    SLICED = (
        "Sliced",
        "cut into slices (MIG) that another resource offers",
        "ask for the resource of the slices, or switch MIG off: nvidia-smi -mig 0",
    )
    TAKEN = (
        "Taken",
        "selected, but taken by {}",
        "narrow the selector of one of the two: a device serves one resource",
    )
    NO_VFS = "NoVfs", "selected, but without VFs", "take kind nic or hca, or create VFs (sriov_numvfs)"
    NO_SRIOV = (
        "NoSriov",
        "selected, but without SR-IOV, so it cannot have VFs",
        "take kind nic, or hca if it has an RDMA device; if the adapter knows SR-IOV, turn it on in firmware and BIOS",
    )
    HAS_VFS = (
        "HasVfs",
        "selected, but with VFs, so not free as a whole",
        "take kind vf or hca, or remove the VFs",
    )
    HOST_PORT = (
        "HostPort",
        "part of a bond, bridge or the like of the host",
        "nothing to do: the host needs it; kind hca can share an adapter that has an RDMA device",
    )
    DEFAULT_ROUTE = (
        "DefaultRoute",
        "needed by the host: its default route, or its way to the API server",
        "nothing to do, unless the host gets another way out, of a metric as low; kind hca can share one with RDMA",
    )
    PROTECTED = "Protected", "named by cni.protect", "take it out of cni.protect"
    NO_DRIVER = (
        "NoDriver",
        "without a driver",
        "echo ADDRESS > /sys/bus/pci/drivers_probe, or look in dmesg why the driver refuses it",
    )
    NO_RDMA = (
        "NoRdma",
        "without an RDMA device",
        "if it can do RDMA, load its module (mlx5_ib, irdma, bnxt_re …); else take kind vf or nic without isRdma",
    )
    IN_A_POD = "InAPod", "with its RDMA device in a pod", "wait until that pod ends, or take kind vf"
    NOT_IN_NVML = (
        "NotInNvml",
        "not shown by NVML, which kinds gpu and rail go by",
        "let the agent see libnvidia-ml.so.1 (nvidia.enabled of the chart); of another vendor: NICs with binding: late",
    )
    NOT_SELECTED = "NotSelected", "not selected by {}", "widen that selector, or add a resource for the rest"
    NOT_NETWORK = (
        "NotNetwork",
        "of a PCI class that is not a network controller's",
        "take kind hca if it has an RDMA device; VFs of other devices are not offered",
    )
    OTHER_KIND = "OtherKind", "no resource is of kind {}", "add one, if pods need it"
    NOT_HANDED_OUT = (
        "NotHandedOut",
        "not handed out by nodefabric: the GPU vendor's device plugin or DRA driver may do that",
        "nothing to do; or, for NVIDIA's, add a resource of kind gpu",
    )


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


def considered(
    resource: Resource, kind: str, snapshot: Snapshot, host_names: Mapping[str, str] = NO_NAMES
) -> Iterator[tuple[str, Candidate, Why | None]]:
    """List what is of the kind, selectors aside: as which kind, and why it is not offered all the same; None if it may.

    `host_names` tells the interface names, in the host, of devices that now sit in pods.
    """
    if kind == "gpu":
        yield from ((kind, _gpu(gpu, snapshot), None) for gpu in snapshot.gpus)
        return
    for each in kinds_of(resource, kind):
        for device in snapshot.devices:
            if _is_of(each, device, resource):
                hcas = [_hca(device, rdma) for rdma in device.rdma_devices] if each == "hca" else []
                for candidate in hcas or [candidate_of(device, snapshot, host_names)]:
                    yield each, candidate, _kept_back(resource, each, device, candidate, snapshot)


def kinds_of(resource: Resource, kind: str) -> tuple[str, ...]:
    """List the kinds of devices that a resource takes as this kind: pools of another project mix VFs and adapters."""
    return ("vf", "nic") if isinstance(resource.compat, SriovPool) and kind != "accelerator" else (kind,)


def offered_candidates(
    resource: Resource, kind: str, snapshot: Snapshot, host_names: Mapping[str, str] = NO_NAMES
) -> Iterator[tuple[str, Candidate]]:
    """List what a resource could take as this kind, selectors aside, with the kind that each is."""
    return ((each, c) for each, c, why in considered(resource, kind, snapshot, host_names) if why is None)


def _is_of(kind: str, device: PciDevice, resource: Resource) -> bool:
    if kind == "hca":
        return not is_accelerator(device) and (resource.compat is not None or not device.is_vf)
    if kind == "accelerator":
        return device.pci_class >> 16 == ACCELERATOR_CLASS
    return device.is_vf == (kind == "vf")


def _kept_back(
    resource: Resource, kind: str, device: PciDevice, candidate: Candidate, snapshot: Snapshot
) -> Why | None:
    # sriov-network-device-plugin leaves devices out that no driver is bound to.
    if resource.compat is not None and not device.driver:
        return Why.NO_DRIVER
    if not {device.address, *candidate.netdevs}.isdisjoint(resource.protected):
        return Why.PROTECTED
    if kind == "hca" and resource.compat is None:
        if candidate.rdma is None:
            return Why.NO_RDMA
        return Why.IN_A_POD if candidate.rdma.absent else None
    if kind == "nic" and device.vfs:
        return Why.HAS_VFS
    # ADD refuses what the host itself uses.
    if kind in ("vf", "nic") and snapshot.is_needed(device):
        return Why.HOST_PORT if any(netdev.is_enslaved for netdev in device.netdevs) else Why.DEFAULT_ROUTE
    if kind != "accelerator" and not device.is_network:
        return Why.NOT_NETWORK
    return Why.NO_RDMA if kind == "hca" and candidate.rdma is None else None


_Group = tuple[str, tuple[Any, ...], Callable[[Any, Candidate], bool]]
"""A field of a selector that has entries, these, and whether a device is as an entry asks."""


def choosing(select: Select) -> Callable[[Candidate], int | None]:
    """Return which of the selector's alternatives takes a device: 0 if it has none, None if none takes it.

    The selector is spelled out once for all the devices of a node.
    """
    groups, others = _groups(select), [choosing(other) for other in select.any_of]

    def choose(candidate: Candidate) -> int | None:
        if _refusing(groups, candidate):
            return None
        if not others:
            return 0
        return next((i for i, other in enumerate(others) if other(candidate) is not None), None)

    return choose


def refusing(select: Select, candidate: Candidate) -> tuple[str, ...]:
    """List the fields of a selector that refuse a device; an empty one stands for its alternatives."""
    found = _refusing(_groups(select), candidate)
    return found if not select.any_of or any(not refusing(o, candidate) for o in select.any_of) else (*found, "")


def takes_vfs_of(select: Select, pf: Candidate) -> bool:
    """Tell whether a selector for VFs would take VFs of an adapter that has none, as far as the adapter shows it."""
    names = {name.lower() for name in pf.pf_names}
    of_both = tuple(group for group in _groups(select) if group[0] in ("vendors", "linkLayer"))
    named = all(not each or any(s.pf.lower() in names for s in each) for each in (select.pf, select.root_devices))
    others = select.any_of
    if select.is_rdma and not pf.rdma_names:
        return False
    return named and not _refusing(of_both, pf) and (not others or any(takes_vfs_of(other, pf) for other in others))


def _groups(select: Select) -> tuple[_Group, ...]:
    return tuple((field, entries, holds) for field, values, holds in _FIELDS if (entries := values(select)))


def _refusing(groups: Iterable[_Group], candidate: Candidate) -> tuple[str, ...]:
    return tuple(field for field, entries, holds in groups if not any(holds(entry, candidate) for entry in entries))


def alternative(select: Select, number: int) -> Select:
    """Return the alternative of that number; the selector itself if it has none."""
    return select.any_of[number] if select.any_of else select


def asks_for_names(resource: Resource) -> bool:
    """Tell whether a selector asks for the name of an interface, which only the books know of a device in a pod."""
    selects = (resource.select, resource.nic.select)
    return any(each.netdevs for select in selects for each in (select, *select.any_of))


def _of_pci(attribute: str) -> Callable[[Any, Candidate], bool]:
    return lambda value, candidate: candidate.pci is not None and getattr(candidate.pci, attribute) == value


def _among(attribute: str) -> Callable[[Any, Candidate], bool]:
    return lambda value, candidate: value in getattr(candidate, attribute)


def _is_of_class(prefix: str, candidate: Candidate) -> bool:
    return candidate.pci is not None and f"{candidate.pci.pci_class:06x}".startswith(prefix)


def _is_of_pf(selector: PfSelector, candidate: Candidate) -> bool:
    return candidate.pci is not None and selector.takes(candidate.pf_names, candidate.pci.vf_index)


def _is_of_root(selector: PfSelector, candidate: Candidate) -> bool:
    pci = candidate.pci
    return pci is not None and selector.takes({pci.physfn or pci.address}, pci.vf_index)


def _has_vdpa(vdpa_type: str, candidate: Candidate) -> bool:
    vdpa = candidate.pci.vdpa if candidate.pci is not None else None
    return vdpa is not None and vdpa.vdpa_type == vdpa_type


_FIELDS: tuple[tuple[str, Callable[[Select], tuple[Any, ...]], Callable[[Any, Candidate], bool]], ...] = (
    ("vendors", lambda s: s.vendors, _of_pci("vendor")),
    ("devices", lambda s: s.devices, _of_pci("device")),
    ("classes", lambda s: s.classes, _is_of_class),
    ("drivers", lambda s: s.drivers, _of_pci("driver")),
    ("pciAddresses", lambda s: s.pci_addresses, _of_pci("address")),
    ("acpiIndexes", lambda s: s.acpi_indexes, _of_pci("acpi_index")),
    ("pf", lambda s: s.pf, _is_of_pf),
    ("rootDevices", lambda s: s.root_devices, _is_of_root),
    ("netdevs", lambda s: s.netdevs, _among("netdevs")),
    ("rdmaDevices", lambda s: s.rdma_devices, _among("rdma_names")),
    ("linkLayer", lambda s: s.link_layers, _among("link_layers")),
    ("pKeys", lambda s: s.pkeys, _among("pkeys")),
    ("isRdma", lambda s: (True,) if s.is_rdma else (), lambda _, c: bool(c.rdma_names)),
    ("vdpaType", lambda s: (s.vdpa_type,) if s.vdpa_type else (), _has_vdpa),
)
"""A field of selectors: its name, its entries, and whether a device is as an entry asks."""


def may_be_nic(address: str, snapshot: Snapshot) -> bool:
    """Tell whether a device is an adapter or a VF of one. What is not on the node may have been."""
    device = snapshot.by_address.get(address)
    return device is None or device.is_network


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


def candidate_of(device: PciDevice, snapshot: Snapshot, host_names: Mapping[str, str] = NO_NAMES) -> Candidate:
    """Describe an adapter, VF or accelerator as a candidate, whether or not it can be one."""
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


# -------------------------------------------------------------------------------------------------------- assignment

EXCLUSIVE_KINDS = frozenset({"vf", "nic", "gpu", "accelerator"})


@dataclass(frozen=True, slots=True)
class Taken:
    """A device that a resource has."""

    kind: str
    """What it is: of a rail, gpu for one half and the kind of its NIC for the other."""
    candidate: Candidate
    alternative: int = 0
    """Which of the selector's alternatives took it."""
    held_for: str = ""
    """A resource that is no more, under whose name a pod still holds it: it must not be handed out yet."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A device that two resources select."""

    device: str
    """As people call it: PCI address and RDMA device, or UUID; or several in short."""
    owner: str
    """Name of the resource that has it."""
    loser: str
    """Name of the resource that selects it too."""

    def __str__(self) -> str:
        return (
            f"{self.loser} selects {self.device}, which {self.owner} has already: a device serves one resource, so"
            " narrow one of the two selectors"
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    taken: Mapping[str, tuple[Taken, ...]] = field(default_factory=dict)
    """Resource name → its devices, in the order of the snapshot."""
    overlaps: tuple[Overlap, ...] = ()

    @property
    def adapters(self) -> frozenset[str]:
        """The network adapters that resources take, each as itself or by its VFs."""
        found = (t.candidate.pci for mine in self.taken.values() for t in mine if t.kind in NETWORK_KINDS)
        return frozenset(pci.physfn or pci.address for pci in found if pci is not None)


def assign(
    resources: Sequence[Resource],
    snapshot: Snapshot,
    host_names: Mapping[str, str] = NO_NAMES,
    holders: Mapping[str, str] = NO_NAMES,
) -> Assignment:
    """Give each device to one resource.

    `host_names` tells the interface names, in the host, of devices that now sit in pods; `holders` the names of the
    resources that devices in pods were handed out under.
    """
    names = {resource.name for resource in resources}
    owners: dict[str, Resource] = {}
    taken: dict[str, list[Taken]] = {resource.name: [] for resource in resources}
    overlaps: list[Overlap] = []
    for resource in resources:
        for kind, candidate, number in _wanted(resource, snapshot, host_names, holders):
            holder = holders.get(candidate.device, "") if kind in EXCLUSIVE_KINDS else ""
            if holder in names and holder != resource.name:
                continue
            owner = next((owners[part] for part in sorted(candidate.parts) if part in owners), None)
            if owner is None or (_shares_all(owner) and _shares_all(resource)):
                owners.update(dict.fromkeys(candidate.parts, resource))
                held_for = holder if holder != resource.name else ""
                taken[resource.name].append(Taken(kind, candidate, number, held_for))
            elif owner is not resource:
                overlaps.append(Overlap(candidate.label, owner.name, resource.name))
    return Assignment(MappingProxyType({name: tuple(found) for name, found in taken.items()}), tuple(overlaps))


def overlap_problems(resources: Sequence[Resource], snapshot: Snapshot) -> list[str]:
    """List the devices that two resources select by mistake, with both resources.

    An HCA and the VFs of the same port are different devices. Pools of other projects' configurations follow their
    rule, first come first served.
    """
    return [str(each) for each in in_short(errors(resources, assign(resources, snapshot).overlaps), snapshot)]


def errors(resources: Sequence[Resource], overlaps: Sequence[Overlap]) -> tuple[Overlap, ...]:
    """Pick the overlaps that are mistakes: among the pools of another project's configuration they are its custom."""
    strict = {resource.name for resource in resources if resource.compat is None}
    return tuple(overlap for overlap in overlaps if overlap.loser in strict or overlap.owner in strict)


def in_short(overlaps: Sequence[Overlap], snapshot: Snapshot) -> tuple[Overlap, ...]:
    """Join the overlaps of each two resources into one that names all the devices in short."""
    devices: dict[tuple[str, str], list[str]] = {}
    for each in overlaps:
        devices.setdefault((each.owner, each.loser), []).append(each.device)
    return tuple(Overlap(grouped(found, snapshot), *pair) for pair, found in devices.items())


def _wanted(
    resource: Resource, snapshot: Snapshot, host_names: Mapping[str, str], holders: Mapping[str, str]
) -> Iterator[tuple[str, Candidate, int]]:
    """List what the selectors take, and what pods hold under the resource's name."""
    if resource.derived_from:
        return  # it has its devices from another
    for _, wanted, select in selectors_of(resource):
        choose = choosing(select)
        for kind, candidate in offered_candidates(resource, wanted, snapshot, host_names):
            number = choose(candidate)
            if number is None and kind in EXCLUSIVE_KINDS and holders.get(candidate.device) == resource.name:
                number = 0
            if number is not None:
                yield kind, candidate, number


def _shares_all(resource: Resource) -> bool:
    return isinstance(resource.compat, SharedPool)
