"""The node's hardware as frozen values.

A `Snapshot` is what one scan saw. It is never changed: a later scan makes another one.
PCI addresses are strings of the form `0000:3b:02.1` (domain:bus:device.function), lower case.
NUMA nodes are integers; -1 means that the firmware did not say (kernel: drivers/base `numa_node`).

On GB300, Vera Rubin and some GB200 hosts a ConnectX-8's PF hangs below a root port of the CPU, while a second function
of the same adapter (15b3:2100, Data Direct) stands with a GPU below the adapter's own switch, in another PCI segment.
Keyword V3 of both functions' vital product data joins them, and nothing else does (rdma-core, kernel-boot/rdma_topo).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from types import MappingProxyType

from agent.model.cloud_topology import AS_SHOWN, Places
from agent.model.gpu_ids import GpuIds
from agent.model.number_ranges import ranges_of, spelled

VENDOR = 0x15B3
"""The vendor of adapters that have such functions."""
_FUNCTION = 0x2100


@dataclass(frozen=True, slots=True)
class DataDirect:
    """Which function of an adapter stands with the GPUs."""

    of: Mapping[str, str]
    """PF → its Data Direct function; PFs without one are left out."""
    unknown: frozenset[str]
    """PFs that may have such a function, but nothing says which: how near they are to a GPU is not known."""
    unpaired: tuple[str, ...]
    """Data Direct functions whose PF is not known."""

    @property
    def is_here(self) -> bool:
        """Whether the host has such functions: its PCI tree alone does not show what is near to what."""
        return bool(self.of or self.unknown or self.unpaired)


NO_DATA_DIRECT = DataDirect(MappingProxyType({}), frozenset(), ())


def is_data_direct(vendor: int, device: int) -> bool:
    """Report whether these PCI IDs are those of a Data Direct function."""
    return vendor == VENDOR and device == _FUNCTION


def may_have_adapter_id(device: PciDevice) -> bool:
    """Report whether a PCI function's vital product data may tell which adapter it belongs to."""
    return device.vendor == VENDOR and not device.is_vf


def pair_functions(devices: Iterable[PciDevice], adapter_ids: Mapping[str, str]) -> DataDirect:
    """Pair PFs with their Data Direct functions by keyword V3.

    `adapter_ids` maps the functions whose vital product data was read to their V3, or to "" where it has none; Data
    Direct functions that have left the bus, too. A PF without a partner surely has none only if it was read, if each
    function has found its PF, and if no PF of its model has one.
    """
    own = {device.address: device for device in devices if may_have_adapter_id(device)}
    functions = [address for address, d in own.items() if is_data_direct(d.vendor, d.device)]
    gone = {adapter_ids[address] for address in adapter_ids.keys() - own.keys()} - {""}
    if not functions and not gone:
        return NO_DATA_DIRECT
    pfs = [address for address in own if address not in functions]
    by_id: dict[str, list[str]] = {}
    for function in functions:
        by_id.setdefault(adapter_ids.get(function, ""), []).append(function)
    by_id.pop("", None)
    found = {pf: by_id[adapter_ids[pf]] for pf in pfs if adapter_ids.get(pf) in by_id}
    of = {pf: partners[0] for pf, partners in found.items() if len(partners) == 1}
    paired = set(of.values())
    unpaired = tuple(function for function in functions if function not in paired)
    models = {own[pf].device for pf in of}
    unknown = frozenset(
        pf
        for pf in pfs
        if pf not in of and (unpaired or own[pf].device in models or pf not in adapter_ids or adapter_ids[pf] in gone)
    )
    return DataDirect(MappingProxyType(of), unknown, unpaired)


@dataclass(frozen=True, slots=True)
class DefaultRoute:
    """One default route of the host's main table, through one interface."""

    netdev: str
    family: int
    """4 or 6."""
    metric: int = 0
    advertised: bool = False
    """A router advertised it (RTPROT_RA): each interface that is up gets one where a router is."""


def only_ways(routes: Iterable[DefaultRoute], below: Callable[[str], frozenset[str]]) -> frozenset[str]:
    """Return the interfaces that the host's default route of IPv4, or that of IPv6, goes through.

    The kernel uses the route of the lowest metric; another is no way out to rely upon, and may lead nowhere. Several
    routes of that metric stand in for each other: only what all of them go through is needed. Routes that routers
    advertise count only if the host has no other. `below` returns an interface and those that it stands upon; it is
    asked once for each interface that counts, and no more than needed.
    """
    all_routes = list(routes)
    counting = [route for route in all_routes if not route.advertised] or all_routes
    found: frozenset[str] = frozenset()
    for family in (4, 6):
        common: frozenset[str] | None = None
        own = [route for route in counting if route.family == family]
        lowest = min((route.metric for route in own), default=0)
        for netdev in sorted({route.netdev for route in own if route.metric == lowest}):
            common = below(netdev) if common is None else common & below(netdev)
            if not common:
                break  # there may be a route through each of a thousand VFs
        found |= common or frozenset()
    return found


NO_NUMA_NODE = -1

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


_REPRESENTOR = re.compile(r"(?:c\d+)?(?:pf\d+.*|.*[vs]f\d+)")
"""pf0vf3, pf0sf88, and c1pf0 for the function of another host: net/core/devlink.c, devlink port names."""


def names_representor(phys_port_name: str) -> bool:
    """Tell whether an interface of this `phys_port_name` stands for another function's port, not for its own."""
    return phys_port_name != "" and _REPRESENTOR.fullmatch(phys_port_name) is not None


def uplink_rank(phys_port_name: str, dev_port: int, name: str) -> tuple[int, int, str]:
    """Sort key that puts a function's own interface first among all that sysfs lists below it.

    In switchdev mode these are its uplink (`p0`; older kernels say nothing) and a representor for each VF (older
    kernels: a plain number). A function with two ports has an interface for each, told apart by `dev_port`.
    """
    if names_representor(phys_port_name):
        return 3, dev_port, name
    if phys_port_name.isdigit():
        return 2, dev_port, name
    return 0 if phys_port_name.startswith("p") else 1, dev_port, name


def is_pci_address(text: str) -> bool:
    """Tell whether the text is a full PCI address in the kernel's spelling."""
    return _PCI_ADDRESS.fullmatch(text) is not None


def is_vfio(driver: str | None) -> bool:
    """Tell whether a driver is vfio-pci or a variant of it for single adapters, such as mlx5_vfio_pci."""
    return driver is not None and driver.replace("_", "-").endswith("vfio-pci")


def drives_for_programs(driver: str | None) -> bool:
    """Tell whether a driver hands its devices to programs, and gives them no interface."""
    return is_vfio(driver) or driver in _UIO_DRIVERS


NETWORK_CLASS, UNASSIGNED_CLASS = 0x02, 0x00FF
"""Base class of network adapters; class and subclass of functions that fit no class."""
_UIO_DRIVERS = frozenset(("uio_pci_generic", "igb_uio"))


def is_accelerator(device: PciDevice) -> bool:
    """Tell whether a PCI function is a GPU or another processor that programs compute with, whoever made it.

    GPUs without a picture say that they are 3D or other display controllers, the rest that they are processing
    accelerators, as FPGAs do. A graphics card (VGA) counts with a driver that computes, and so does another display
    controller (virtual machines have such) unless its maker makes GPUs. A GPU in a CPU of Intel's never does.
    """
    kind = device.pci_class >> 8
    if device.is_vf or kind not in _COMPUTING or device.vendor == _XILINX:
        return False
    if device.vendor == _INTEL and device.address.endswith(":00:02.0") and len(device.path) == 2:
        return False
    may_be_a_picture = kind == _VGA or (kind == _DISPLAY and device.vendor not in _GPU_MAKERS)
    return not may_be_a_picture or device.driver in _COMPUTING_DRIVERS


_VGA, _DISPLAY = 0x0300, 0x0380
_COMPUTING = frozenset((_VGA, 0x0302, _DISPLAY, 0x1200))
_COMPUTING_DRIVERS = frozenset(("amdgpu", "i915", "nvidia", "xe"))
_INTEL, _XILINX = 0x8086, 0x10EE
_GPU_MAKERS = frozenset((_INTEL, 0x1002, 0x10DE))
"""Intel, AMD, NVIDIA: their display controllers are GPUs of servers, also while no driver or vfio-pci has them."""


class LinkLayer(Enum):
    """Link layer of an RDMA port or netdev, in the words of sysfs `link_layer`."""

    ETHERNET = "Ethernet"
    INFINIBAND = "InfiniBand"
    UNSPECIFIED = "Unspecified"


@dataclass(frozen=True, slots=True)
class Netdev:
    """A network interface that sits in the host's network namespace."""

    name: str
    ifindex: int
    mac: str
    mtu: int
    operstate: str
    """up, down, dormant, unknown …: RFC 2863 states as /sys/class/net/*/operstate spells them."""
    carrier: bool | None
    """None while the interface is administratively down: the kernel then refuses to say."""
    link_layer: LinkLayer
    speed_mbps: int | None
    phys_port_name: str = ""
    """`p0` for an uplink, `pf0vf3` for a switchdev representor, else empty."""
    dev_port: int = 0
    """Number of the port, on a function that has several."""
    is_enslaved: bool = False
    """It is part of a bond, bridge or the like."""

    @property
    def is_representor(self) -> bool:
        return self.phys_port_name != "" and names_representor(self.phys_port_name)


@dataclass(frozen=True, slots=True)
class RdmaPort:
    number: int
    state: str
    """DOWN, INIT, ARMED, ACTIVE, ACTIVE_DEFER (include/rdma/ib_verbs.h, enum ib_port_state)."""
    link_layer: LinkLayer
    rate_gbps: float
    pkey: int | None = None
    """The first partition key of an InfiniBand port; None for others."""
    subnet_prefix: str = ""
    """Of an InfiniBand port that is ACTIVE, as its subnet manager has set it: 16 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class CharDevice:
    """A character device of an RDMA device, as the container must see it."""

    kind: str
    """uverbs, umad or issm."""
    path: str
    """/dev/infiniband/uverbs0"""
    port: int | None = None
    """umad and issm exist once per port."""


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    name: str
    node_type: str
    """CA, RNIC, usNIC, unspecified …: the text after the number in sysfs `node_type`."""
    node_guid: str
    fw_version: str
    ports: tuple[RdmaPort, ...]
    char_devices: tuple[CharDevice, ...]
    absent: bool = False
    """It is in a pod. All that is known of it are its name there and its character devices."""

    @property
    def guid(self) -> str:
        """The node GUID as 0c42a10300651234; empty for zeros, as virtual machines have, or ones."""
        digits = re.sub("[^0-9a-f]", "", self.node_guid.lower())
        return digits if digits.strip("0") and digits.strip("f") else ""

    def char_device(self, kind: str) -> tuple[CharDevice, ...]:
        return tuple(c for c in self.char_devices if c.kind == kind)


@dataclass(frozen=True, slots=True)
class VdpaDevice:
    """A vDPA device on a PCI function."""

    name: str
    driver: str
    """vhost_vdpa or virtio_vdpa; empty if none is bound."""
    path: str
    """/dev/vhost-vdpa-0; empty for virtio_vdpa."""

    @property
    def vdpa_type(self) -> str:
        """vhost or virtio; empty if no driver is bound."""
        return self.driver.removesuffix("_vdpa") if self.driver.endswith("_vdpa") else ""


@dataclass(frozen=True, slots=True)
class PciDevice:
    address: str
    path: tuple[str, ...]
    """From the host bridge down: ("pci0000:3a", "0000:3a:00.0", …, own address)."""
    pci_class: int
    """24 bits: 0x020000 Ethernet, 0x020700 InfiniBand, 0x030200 3D controller."""
    vendor: int
    device: int
    driver: str | None
    numa_node: int
    iommu_group: int | None
    physfn: str | None = None
    """PCI address of the PF, for a VF."""
    vf_index: int | None = None
    vfs: tuple[str, ...] = ()
    """PCI addresses of a PF's VFs, by VF index."""
    sriov_totalvfs: int = 0
    netdevs: tuple[Netdev, ...] = ()
    rdma_devices: tuple[RdmaDevice, ...] = ()
    acpi_index: str = ""
    """The firmware's number for a device on the board; empty for most, and for VFs."""
    uio: str = ""
    """uio0, for a device bound to a uio driver."""
    noiommu: bool = False
    """Its IOMMU group is one that vfio made up where there is no IOMMU."""
    vdpa: VdpaDevice | None = None
    cxi: str = ""
    """cxi0, for an HPE Slingshot adapter or a VF of one: its character device."""

    @property
    def is_vf(self) -> bool:
        return self.physfn is not None

    @property
    def is_pf(self) -> bool:
        return self.sriov_totalvfs > 0

    @property
    def is_network(self) -> bool:
        """A network adapter, or a VF of one. Class 00ff (unassigned) says nothing: Alibaba's eRDMA has it."""
        is_unassigned = self.pci_class >> 8 == UNASSIGNED_CLASS
        return self.pci_class >> 16 == NETWORK_CLASS or (is_unassigned and bool(self.netdevs or self.rdma_devices))

    @property
    def is_for_vfio(self) -> bool:
        """Handed to a program as it is (DPDK, a virtual machine): the kernel gives it no interface."""
        return is_vfio(self.driver)

    @property
    def is_for_programs(self) -> bool:
        """Driven by a program in the pod, through vfio or uio."""
        return drives_for_programs(self.driver)

    @property
    def is_for_rdma_alone(self) -> bool:
        """Whole, and without an interface: EFA, InfiniBand, and eRDMA, whose interface is another function's."""
        layers = {port.link_layer for rdma in self.rdma_devices for port in rdma.ports}
        needs_one = LinkLayer.ETHERNET in layers and self.pci_class >> 8 != UNASSIGNED_CLASS
        return not (self.is_vf or self.netdevs) and bool(layers) and not needs_one

    @property
    def netdev(self) -> Netdev | None:
        """The interface of this function itself, never a representor of one of its VFs."""
        own = [n for n in self.netdevs if not n.is_representor]
        if len(own) > 1:
            return min(own, key=lambda n: uplink_rank(n.phys_port_name, n.dev_port, n.name))
        return own[0] if own else None


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A slice of a GPU that programs use like a GPU of its own."""

    uuid: str
    profile: str
    """1g.10gb, 1c.3g.40gb, 1g.10gb+me: as the driver names it."""
    gpu_instance: int
    compute_instance: int
    memory_bytes: int
    index: int = 0
    """The driver's number for it among the slices of its GPU; another after they were cut anew."""


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    index: int
    minor: int | None
    pci_address: str
    name: str
    memory_bytes: int
    nvlinks: tuple[tuple[str, int], ...] = ()
    """(peer GPU's UUID, number of links), by UUID. Behind NVSwitches each GPU is a peer of all others, by all links."""
    fabric_clique: str = ""
    """`cluster UUID.clique ID` of the NVLink domain that it joined; empty on hosts that have none beyond the host."""
    mig_mode: bool = False
    """It is cut into slices: programs can use `mig_devices`, not the GPU."""
    mig_devices: tuple[MigDevice, ...] = ()
    ailments: tuple[str, ...] = ()
    """Reason words for what a reading shows to be wrong now: GpuLost, EccUncorrectable … (`device_health`)."""
    enumeration: int = 0
    """How often this process has found it anew: after a reset, a rebind, or when the driver was loaded again."""
    names: tuple[str, ...] = ()
    """What its driver, and so its vendor's device plugin, calls it or a part of it: card0, amdgpu_xcp_3, davinci0."""


@dataclass(frozen=True, slots=True)
class NumaNode:
    number: int
    cpus: tuple[int, ...]
    memory_bytes: int
    hugepages: tuple[tuple[int, int], ...] = ()
    """(page size in bytes, number of pages), by size."""
    distances: tuple[int, ...] = ()
    """SLIT distances to all nodes, in node order."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something a scan could not read. The device concerned is left out or incomplete."""

    path: str
    text: str


@dataclass(frozen=True)
class Snapshot:
    """All that one scan of the node saw.."""

    devices: tuple[PciDevice, ...] = ()
    """PCI devices with an inventory meaning (bridges left out), by address."""
    gpus: tuple[Gpu, ...] = ()
    """Those that the NVIDIA driver's library (NVML) tells of."""
    accelerators: tuple[Gpu, ...] = ()
    """All that sysfs shows, of any vendor, by address, which stands for the UUID."""
    numa_nodes: tuple[NumaNode, ...] = ()
    rdma_cm: bool = False
    """/dev/infiniband/rdma_cm exists."""
    rdma_exclusive: bool = False
    """Each RDMA device belongs to one network namespace, and so goes along into a pod."""
    vhost_net: bool = False
    """/dev/vhost-net and /dev/net/tun exist."""
    default_routes: tuple[DefaultRoute, ...] = ()
    only_ways: frozenset[str] = frozenset()
    """Interfaces without which the host is cut off: each carries its default route of IPv4 or IPv6, is the way to the
    API server, or stands below one that does."""
    boot_id: str = ""
    machine: str = ""
    """What it is called: vendor and product, in a virtual machine of a cloud the kind of instance, or a word for it."""
    places: Places = AS_SHOWN
    """Where devices stand, if the PCI tree does not tell."""
    adapter_ids: tuple[tuple[str, str], ...] = ()
    """(PCI address, UUID that all functions of its adapter share), by address, of functions whose vital product data
    was read; "" where that has none."""
    adapter_ids_due: bool = False
    """More of them are about to be read."""
    gpu_ids: tuple[GpuIds, ...] = ()
    """What plugins call GPUs, besides what is known."""
    problems: tuple[Problem, ...] = ()
    generation: int = field(default=0, compare=False)
    """Counts changes; 0 before the first scan."""

    @cached_property
    def by_address(self) -> Mapping[str, PciDevice]:
        return MappingProxyType({d.address: d for d in self.devices})

    @cached_property
    def gpu_by_uuid(self) -> Mapping[str, Gpu]:
        """GPUs of any vendor. Those that only sysfs shows have their PCI address for a UUID."""
        return MappingProxyType({g.uuid: g for g in self.all_gpus})

    @cached_property
    def all_gpus(self) -> tuple[Gpu, ...]:
        """List the GPUs of any vendor: those that NVML tells of in its order, then those that only sysfs shows."""
        told = {gpu.pci_address for gpu in self.gpus}
        first = max((gpu.index for gpu in self.gpus), default=-1) + 1
        rest = [gpu for gpu in self.accelerators if gpu.pci_address not in told]
        ordered = sorted(self.gpus, key=lambda gpu: gpu.index)
        return (*ordered, *(replace(gpu, index=first + number) for number, gpu in enumerate(rest)))

    @cached_property
    def data_direct(self) -> DataDirect:
        """Which adapters' traffic with GPUs takes another PCI function than their PF."""
        return pair_functions(self.devices, dict(self.adapter_ids))

    def parent(self, device: PciDevice) -> PciDevice | None:
        """The PF of a VF; None for anything else."""
        return self.by_address.get(device.physfn) if device.physfn else None

    def is_needed(self, device: PciDevice) -> bool:
        """The host itself uses an interface of it: as a port of a bond or bridge, or as its only way out."""
        return any(netdev.is_enslaved or netdev.name in self.only_ways for netdev in device.netdevs)

    def pf_netdev(self, device: PciDevice) -> Netdev | None:
        """The PF's own interface, for a VF; the device's own, for anything else."""
        owner = self.parent(device) or device
        return owner.netdev


@dataclass(frozen=True, slots=True)
class CpuPlace:
    socket: int
    core: int
    """Unique within its socket only."""


def cpu_list(cpus: Iterable[int]) -> str:
    """Write a set of CPUs as the kernel and kubelet do: {0, 1, 2, 8} → `0-2,8`."""
    return spelled(ranges_of(cpus))
