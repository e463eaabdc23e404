"""vDPA devices as /sys/bus/vdpa shows them, and what programs use next to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from agent.hardware.sysfs_read import Attributes
from agent.model.device import VdpaDevice

_DEVICES = "/sys/bus/vdpa/devices"
_VHOST_NET = {"vhost-net": "vhost-net", "tun": "net/tun"}
"""Names and nodes of the two (drivers/vhost/net.c, drivers/net/tun.c, struct miscdevice)."""


def read_vdpa_devices(read: Attributes, function: Callable[[str | None], str | None]) -> Mapping[str, VdpaDevice]:
    """List the vDPA devices by the PCI function they hang on; `function` finds that in a link's target.

    A function with several (subfunctions have their own) shows its first.
    """
    found: dict[str, VdpaDevice] = {}
    for name in read.names(_DEVICES):
        address = function(read.link(f"{_DEVICES}/{name}"))
        if address is not None and address not in found:
            driver = os.path.basename(read.link(f"{_DEVICES}/{name}/driver") or "")
            # drivers/vhost/vdpa.c, vhost_vdpa_probe: vhost-vdpa-N is a child of the device, and a character device.
            nodes = [n for n in read.names(f"{_DEVICES}/{name}") if n.startswith("vhost-vdpa-")]
            found[address] = VdpaDevice(name, driver, f"/dev/{nodes[0]}" if nodes else "")
    return found


def vhost_net_present(read: Attributes) -> bool:
    """Tell whether the kernel's virtio back end for networks, and what it needs, have their devices.

    The agent's container has a /dev of its own: there only sysfs tells, once the modules are loaded.
    """
    return all(
        read.exists(f"/dev/{node}") or read.exists(f"/sys/class/misc/{name}") for name, node in _VHOST_NET.items()
    )
