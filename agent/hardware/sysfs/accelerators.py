"""GPUs and other accelerators of any vendor, as sysfs shows them: no library of a driver's is asked.

What its vendor's device plugin calls one is found where the driver tells it:

    card0, renderD128   below the PCI function, in `drm` (drivers/gpu/drm/drm_sysfs.c)
    accel0, hl0         likewise in `accel` (drivers/accel/drm_accel.c), of older Gaudi drivers in `habanalabs`; others
                        have a class of their own, whose entries have a device number (`dev`)
    amdgpu_xcp_0        a partition of an AMD GPU: a platform device, whose render node KFD counts to the GPU
    davinci0            Huawei's driver lists all its devices in `devdrv_sysfs_bdf_to_devid` of each

The links between AMD's GPUs (xGMI) are in KFD's topology (drivers/gpu/drm/amd/amdkfd, kfd_topology.c, kfd_crat.h).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from agent.hardware.sysfs.read import Attributes
from agent.model.device import Gpu, PciDevice, is_accelerator

AMD, HUAWEI = 0x1002, 0x19E5
_VENDORS = {AMD: "AMD", 0x8086: "Intel", 0x10DE: "NVIDIA", 0x1DA3: "Habana", HUAWEI: "Huawei"}
_FUNCTIONS = "/sys/bus/pci/devices"
_PLATFORM = "/sys/devices/platform"
_KFD = "/sys/class/kfd/kfd/topology/nodes"
_FAMILIES = ("drm", "accel", "habanalabs")
_OF_NICS = ("infiniband", "net", "ptp")
"""What an accelerator with network functions has besides, as Gaudi does: files of these are no accelerator's."""
_XGMI = 11
_ONE_HOP = 15
"""Weight of a link without another GPU between (KFD_CRAT_XGMI_WEIGHT)."""
_LINK_MBPS = 50_000
"""Bandwidth of one xGMI link, as KFD tells it; older kernels tell 0."""

Links = Mapping[str, tuple[tuple[str, int], ...]]
"""GPU → (peer, number of links), by PCI address."""


def read_accelerators(read: Attributes, devices: Iterable[PciDevice]) -> tuple[Gpu, ...]:
    """Read what is known of the accelerators among some PCI functions. Nothing is read where there is none."""
    found = [device for device in devices if is_accelerator(device)]
    names = {device.address: list(_names_below(read, device.address)) for device in found}
    links: Links = {}
    if any(device.vendor == AMD for device in found):
        of_node, of_render_node = _kfd_nodes(read)
        for partition, address in _partitions(read, of_render_node):
            names.get(address, []).append(partition)
        links = _xgmi(read, of_node)
    return tuple(
        Gpu(
            uuid=device.address,
            index=index,
            minor=None,
            pci_address=device.address,
            name=_product(read, device),
            memory_bytes=read.whole(f"{_FUNCTIONS}/{device.address}/mem_info_vram_total", 0),
            nvlinks=links.get(device.address, ()),
            names=(*names[device.address], *(_davinci(read, device.address) if device.vendor == HUAWEI else ())),
        )
        for index, device in enumerate(found)
    )


def _names_below(read: Attributes, address: str) -> Iterator[str]:
    """Name a function's device files: what kernel classes have of it, which may be a driver's own (cambricon_dev0)."""
    function = f"{_FUNCTIONS}/{address}"
    for family in read.folders(function):
        if family in _FAMILIES:
            yield from read.names(f"{function}/{family}")
        elif not family.startswith(_OF_NICS):
            names = read.names(f"{function}/{family}")
            yield from (name for name in names if read.exists(f"{function}/{family}/{name}/dev"))


def _product(read: Attributes, device: PciDevice) -> str:
    told = read.text(f"{_FUNCTIONS}/{device.address}/product_name")
    return told or f"{_VENDORS.get(device.vendor, f'{device.vendor:04x}')} {device.device:04x}"


def _davinci(read: Attributes, address: str) -> Iterator[str]:
    """Find a device's own number: rows are `c1:00.0 ---> 0`, with a domain in newer drivers."""
    for row in (read.text(f"{_FUNCTIONS}/{address}/devdrv_sysfs_bdf_to_devid") or "").splitlines():
        place, _, number = (part.strip() for part in row.partition("--->"))
        if place and number.isdecimal() and f"0000:{place}".endswith(address):
            yield f"davinci{number}"


def _kfd_nodes(read: Attributes) -> tuple[dict[str, str], dict[str, str]]:
    """Map KFD's nodes, and render nodes (`renderD128`), to the PCI addresses of their GPUs."""
    of_node, of_render_node = {}, {}
    for node in read.names(_KFD):
        told = _properties(read, f"{_KFD}/{node}/properties")
        if not told.get("simd_count"):
            continue  # CPUs
        # The number of a partition is in the upper bits (kfd_topology.c, kfd_topology_add_device).
        place = told.get("location_id", 0) & 0xFFFF
        address = f"{told.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
        of_node[node] = address
        of_render_node[f"renderD{told.get('drm_render_minor', 0)}"] = address
    return of_node, of_render_node


def _partitions(read: Attributes, of_render_node: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """List the partitions of AMD GPUs that are in use, each with its GPU."""
    for name in read.names(_PLATFORM):
        if name.startswith("amdgpu_xcp_"):
            for file in read.names(f"{_PLATFORM}/{name}/drm"):
                if file in of_render_node:
                    yield name, of_render_node[file]


def _xgmi(read: Attributes, of_node: Mapping[str, str]) -> Links:
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for here, node in {here: node for node, here in of_node.items()}.items():  # one for all partitions of a GPU
        for number in read.names(f"{_KFD}/{node}/io_links"):
            link = _properties(read, f"{_KFD}/{node}/io_links/{number}/properties")
            there = of_node.get(str(link.get("node_to")), here)
            if link.get("type") == _XGMI and there != here and link.get("weight", _ONE_HOP) <= _ONE_HOP:
                count = max(1, round(link.get("max_bandwidth", 0) / _LINK_MBPS))
                found[here][there] = max(count, found[here].get(there, 0))
    return {here: tuple(sorted(peers.items())) for here, peers in found.items()}


def _properties(read: Attributes, path: str) -> dict[str, int]:
    """Read lines of a name and a number."""
    pairs = (line.split() for line in (read.text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
