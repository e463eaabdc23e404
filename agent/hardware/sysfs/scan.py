"""The scan: PCI devices with their interfaces, RDMA devices and NUMA nodes, from /sys and /proc.

Owns the PCI tree and puts the other subsystems' readings onto it. What NVML knows of GPUs is `nvml`'s
business. The root may be a node file's folder instead of `/`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from agent.hardware.sysfs.accelerators import read_accelerators
from agent.hardware.sysfs.classes import (
    INFINIBAND,
    NET,
    Classes,
    IsOwn,
    absent_rdma,
    all_own,
    names_by_function,
    read_vdpa_devices,
    vhost_net_present,
)
from agent.hardware.sysfs.netdev import needed_ways, read_default_routes, read_netdev
from agent.hardware.sysfs.numa import read_numa_nodes
from agent.hardware.sysfs.rdma import absent_rdma_device, rdma_cm_present, read_char_devices, read_rdma_device
from agent.hardware.sysfs.read import Attributes
from agent.model.data_direct import is_data_direct
from agent.model.device import NO_NUMA_NODE, PciDevice, Snapshot, drives_for_programs, is_pci_address, is_vfio
from agent.model.places import known_places

PCI_DEVICES = "/sys/bus/pci/devices"
_DMI = "/sys/class/dmi/id"
_BASE_CLASSES = frozenset({0x02, 0x03, 0x12})
"""Network controllers, display controllers (GPUs), processing accelerators."""
_INFINIBAND_CONTROLLER = 0x0C06
_BRIDGE = 0x06
_DMA_CONTROLLER = 0x0801
"""The class of Data Direct functions."""

_CRAY = 0x17DB
"""The vendor of HPE's Slingshot adapters, whose driver makes a device of class cxi below a function."""
_MAX_VFS = 65535
"""TotalVFs is 16 bits wide (PCIe base specification, SR-IOV capability)."""


def scan(root: Path, is_own: IsOwn = all_own) -> Snapshot:
    """Read the node's hardware below root. What cannot be read is in `problems`.

    `is_own` tells software RDMA devices of this namespace from those of pods.

    A device that vanishes meanwhile is left out without a problem. Raises HardwareError where no descriptor is left
    to read with: all that is there would seem to be gone.
    """
    read = Attributes(root)
    char_devices = read_char_devices(read)
    classes = Classes(
        netdevs=names_by_function(read, NET),
        rdma=names_by_function(read, INFINIBAND, is_own),
        char_devices=char_devices,
        absent=absent_rdma(read, char_devices),
        vdpa=read_vdpa_devices(read),
    )
    devices: dict[str, PciDevice] = {}
    vf_indices: dict[str, int] = {}
    for address in read.names(PCI_DEVICES):
        device = read_function(read, address, classes, vf_indices) if is_pci_address(address) else None
        if device is not None:
            devices[address] = device
    for address, index in vf_indices.items():
        if address in devices:
            devices[address] = replace(devices[address], vf_index=index)
    default_routes = read_default_routes(read)
    accelerators = read_accelerators(read, devices.values())
    found = Snapshot(
        devices=tuple(devices.values()),
        accelerators=accelerators,
        numa_nodes=read_numa_nodes(read),
        rdma_cm=rdma_cm_present(read),
        vhost_net=vhost_net_present(read),
        default_routes=default_routes,
        only_ways=needed_ways(read, default_routes),
        boot_id=read.text("/proc/sys/kernel/random/boot_id") or "",
        machine=" ".join(filter(None, (read.text(f"{_DMI}/{name}") for name in ("sys_vendor", "product_name")))),
        places=known_places(
            (gpu.pci_address for gpu in accelerators), (d.address for d in devices.values() if len(d.path) == 2)
        ),
        problems=read.problems,
    )
    read.check_complete()
    return found


def read_function(read: Attributes, address: str, classes: Classes, vf_indices: dict[str, int]) -> PciDevice | None:
    """Read one PCI device; None if it has no inventory meaning or went away.

    Adds the indices of a PF's VFs: only the PF's links tell them.
    """
    folder = f"{PCI_DEVICES}/{address}"
    target = read.link(folder)
    pci_class = read.whole(f"{folder}/class", -1, 16)
    if target is None or pci_class < 0:
        read.lacks(folder, "class")
        return None
    if pci_class >> 16 == _BRIDGE:
        return None
    physfn = read.link(f"{folder}/physfn")
    totalvfs = 0 if physfn else read.whole(f"{folder}/sriov_totalvfs", 0)
    known = totalvfs or physfn or _is_of_interest(pci_class) or classes.has(address)
    if not known and pci_class >> 8 != _DMA_CONTROLLER:
        return None
    vendor = read.whole(f"{folder}/vendor", -1, 16)
    product = read.whole(f"{folder}/device", -1, 16)
    if vendor < 0 or product < 0:
        read.lacks(folder, "device" if product < 0 else "vendor")
        return None
    if not known and not is_data_direct(vendor, product):
        return None
    vfs = _vfs(read, folder, totalvfs)
    vf_indices.update(vfs)
    driver = sys.intern(os.path.basename(read.link(f"{folder}/driver") or "")) or None
    for_vfio = is_vfio(driver)
    uio = read.names(f"{folder}/uio") if drives_for_programs(driver) and not for_vfio else []
    return PciDevice(
        address=address,
        path=_path(target),
        pci_class=pci_class,
        vendor=vendor,
        device=product,
        driver=driver,
        numa_node=read.whole(f"{folder}/numa_node", NO_NUMA_NODE),
        iommu_group=_group(read.link(f"{folder}/iommu_group")),
        physfn=os.path.basename(physfn) if physfn else None,
        vfs=tuple(vfs),
        sriov_totalvfs=totalvfs,
        netdevs=tuple(n for name in classes.netdevs.get(address, ()) if (n := read_netdev(read, name))),
        rdma_devices=tuple(
            r for name in classes.rdma.get(address, ()) if (r := read_rdma_device(read, name, classes.char_devices))
        )
        + tuple(absent_rdma_device(name, classes.char_devices) for name in classes.absent.get(address, ())),
        # Functions that the firmware knows; a VF is none (drivers/pci/pci-label.c).
        acpi_index="" if physfn else read.text(f"{folder}/acpi_index") or "",
        uio=uio[0] if uio else "",
        # drivers/vfio/group.c: such a group is called so, and its device file noiommu-N.
        noiommu=for_vfio and read.text(f"{folder}/iommu_group/name") == "vfio-noiommu",
        vdpa=classes.vdpa.get(address),
        cxi=next(iter(read.names(f"{folder}/cxi")), "") if vendor == _CRAY else "",
    )


def _is_of_interest(pci_class: int) -> bool:
    return pci_class >> 16 in _BASE_CLASSES or pci_class >> 8 == _INFINIBAND_CONTROLLER


def _path(target: str) -> tuple[str, ...]:
    """Cut `../../../devices/pci0000:3a/0000:3a:00.0/…` down to the part from the host bridge on."""
    parts = target.split("/")
    start = next((i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part), len(parts) - 1)
    return tuple(map(sys.intern, parts[start:]))


def _group(target: str | None) -> int | None:
    name = os.path.basename(target or "")
    return int(name) if name.isdecimal() else None


def _vfs(read: Attributes, folder: str, totalvfs: int) -> dict[str, int]:
    """Read the addresses of a PF's VFs with their indices, by index."""
    # Not up to sriov_numvfs: that number is set last while VFs come, and VF 0 goes first while
    # they leave (drivers/pci/iov.c), so there can be gaps.
    found = {}
    for index in range(min(totalvfs, _MAX_VFS)):
        if link := read.link(f"{folder}/virtfn{index}"):
            found[os.path.basename(link)] = index
    return found
