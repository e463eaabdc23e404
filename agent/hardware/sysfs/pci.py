"""PCI functions: what hangs on them (the entries of class folders such as /sys/class/net, and vDPA devices), how one is
read, and how one is bound to a driver. The kernel has bound or unbound it when the write returns."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from posixpath import basename

from agent.errors import HardwareError
from agent.hardware.sysfs.netdev import read_netdev
from agent.hardware.sysfs.rdma import CharDevices, absent_rdma_device, read_rdma_device
from agent.hardware.sysfs.read import Attributes
from agent.model.device import (
    NO_NUMA_NODE,
    PciDevice,
    VdpaDevice,
    drives_for_programs,
    is_data_direct,
    is_pci_address,
    is_vfio,
)

PCI_DEVICES = "/sys/bus/pci/devices"
NET = "/sys/class/net"
INFINIBAND = "/sys/class/infiniband"
VERBS = "/sys/class/infiniband_verbs"
MAD = "/sys/class/infiniband_mad"
_VDPA = "/sys/bus/vdpa/devices"
_VHOST_NET = {"vhost-net": "vhost-net", "tun": "net/tun"}
"""Names and nodes of the two (drivers/vhost/net.c, drivers/net/tun.c, struct miscdevice)."""

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

Names = Mapping[str, list[str]]
IsOwn = Callable[[str], bool]
"""Tells whether a software RDMA device runs over an interface of this namespace. Pods may make some over their own,
which are seen by all, and every pod has an eth0."""


def all_own(name: str) -> bool:
    """Take every software RDMA device for one of this namespace, where there is nobody to ask."""
    return True


@dataclass(frozen=True, slots=True)
class Classes:
    """What hangs on PCI functions, by their address."""

    netdevs: Names
    rdma: Names
    char_devices: CharDevices
    absent: Names
    """RDMA devices that are in pods: each namespace has a class infiniband of its own, but there is one
    infiniband_verbs for all (drivers/infiniband/core: device.c, ib_class; uverbs_main.c, uverbs_class)."""
    vdpa: Mapping[str, VdpaDevice]

    def has(self, address: str) -> bool:
        """Whether an interface or an RDMA device hangs on a function, also one that is in a pod."""
        return address in self.netdevs or address in self.rdma or address in self.absent


def function_in(target: str | None) -> str | None:
    """Find the innermost PCI address in a link's target."""
    for part in reversed((target or "").split("/")):
        if is_pci_address(part):
            return part
    return None


def function_below(read: Attributes, folder: str, name: str, is_own: IsOwn = all_own) -> str | None:
    """Find the PCI function that an entry of a class folder hangs on; None if it hangs on none.

    The class link tells it in one call, and sees an interface below a virtio device as well. A
    software RDMA device (rxe) hangs on nothing; its `parent` names the interface it runs over.
    """
    address = function_in(read.link(f"{folder}/{name}"))
    if address is None and folder == INFINIBAND:
        parent = read.text(f"{folder}/{name}/parent") or read.text(f"{folder}/{name}/ports/1/gid_attrs/ndevs/0")
        if parent and "/" not in parent:
            address = function_in(read.link(f"{NET}/{parent}"))
            if address is not None and not is_own(name):
                return None
    return address


def read_vdpa_devices(read: Attributes) -> Mapping[str, VdpaDevice]:
    """List the vDPA devices by the PCI function they hang on.

    A function with several (subfunctions have their own) shows its first.
    """
    found: dict[str, VdpaDevice] = {}
    for name in read.names(_VDPA):
        address = function_in(read.link(f"{_VDPA}/{name}"))
        if address is not None and address not in found:
            driver = basename(read.link(f"{_VDPA}/{name}/driver") or "")
            # drivers/vhost/vdpa.c, vhost_vdpa_probe: vhost-vdpa-N is a child of the device, and a character device.
            nodes = [n for n in read.names(f"{_VDPA}/{name}") if n.startswith("vhost-vdpa-")]
            found[address] = VdpaDevice(name, driver, f"/dev/{nodes[0]}" if nodes else "")
    return found


def vhost_net_present(read: Attributes) -> bool:
    """Tell whether the kernel's virtio back end for networks, and what it needs, have their devices.

    The agent's container has a /dev of its own: there only sysfs tells, once the modules are loaded.
    """
    return all(
        read.exists(f"/dev/{node}") or read.exists(f"/sys/class/misc/{name}") for name, node in _VHOST_NET.items()
    )


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


def unbind(root: Path, device: str) -> None:
    """Free a function from its driver. One without is success."""
    path = root / "sys/bus/pci/devices" / device / "driver/unbind"
    try:
        path.write_text(device)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if path.exists():
            raise HardwareError(f"{device} cannot be unbound from its driver: {error.strerror}") from error


def bind(root: Path, device: str, driver: str) -> None:
    """Bind a function to a driver. One that is bound to it already is success."""
    try:
        (root / "sys/bus/pci/drivers" / driver / "bind").write_text(device)
    except OSError as error:
        bound = root / "sys/bus/pci/devices" / device / "driver"
        if not bound.exists() or bound.resolve().name != driver:
            raise HardwareError(
                f"{device} cannot be bound to {driver}: {error.strerror}; look at the kernel's log (dmesg)"
            ) from error


def require_writable(root: Path, what: str) -> None:
    """Raise HardwareError where sysfs is read-only, as in most containers, before anything begins."""
    path = root / "sys/bus/pci"
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise HardwareError(f"{path} is read-only, and {what} writes there: add daemonset/components/sysfs")
