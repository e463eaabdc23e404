"""What hangs on PCI functions: the entries of class folders such as /sys/class/net, and vDPA devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from posixpath import basename

from agent.hardware.sysfs.rdma import CharDevices
from agent.hardware.sysfs.read import Attributes, shown
from agent.model.device import VdpaDevice, is_pci_address

NET = "/sys/class/net"
INFINIBAND = "/sys/class/infiniband"
VERBS = "/sys/class/infiniband_verbs"
MAD = "/sys/class/infiniband_mad"
_VDPA = "/sys/bus/vdpa/devices"
_VHOST_NET = {"vhost-net": "vhost-net", "tun": "net/tun"}
"""Names and nodes of the two (drivers/vhost/net.c, drivers/net/tun.c, struct miscdevice)."""

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
    """RDMA devices that are in pods."""
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


def names_by_function(read: Attributes, folder: str, is_own: IsOwn = all_own) -> Names:
    """Group the entries of a class folder by the PCI function they hang on."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in read.names(folder):
        address = function_below(read, folder, name, is_own)
        if address is not None:
            found[address].append(name)
    return found


def absent_rdma(read: Attributes, char_devices: CharDevices) -> Names:
    """Group the RDMA devices that moved into other namespaces by the PCI function they hang on.

    Each namespace has a class infiniband of its own, but there is one infiniband_verbs for all
    (drivers/infiniband/core: device.c, ib_class; uverbs_main.c, uverbs_class).
    """
    here = set(map(shown, read.names(INFINIBAND)))
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, devices in char_devices.items():
        verbs = next((basename(d.path) for d in devices if d.kind == "uverbs"), None)
        if name not in here and verbs is not None:
            address = function_in(read.link(f"{VERBS}/{verbs}"))
            if address is not None:
                found[address].append(name)
    return found


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
