"""What a kernel uevent is about, and so worth looking at again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from agent.model.change import EVERYTHING, Change, of_function, of_netdev
from agent.model.device import is_pci_address

SUBSYSTEMS = ("pci", "net", "infiniband", "infiniband_verbs", "infiniband_mad", "vdpa", "misc")
"""Those that a scan looks at."""
_MISC = frozenset({"rdma_cm", "vhost-net", "tun"})
"""Of subsystem misc: devices that come and go with their modules."""
_VIRTUAL_NET = "/devices/virtual/net/"
_COMES_OR_GOES = frozenset({"add", "remove", "change", "move"})
"""What they may do to the PCI bus; `change` ends the making of VFs (drivers/pci/iov.c, sriov_enable)."""


@dataclass(frozen=True, slots=True)
class Uevent:
    action: str
    """add, remove, change, move, online, offline, bind or unbind."""
    path: str
    """Below /sys: /devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/net/ens1f0."""
    subsystem: str

    @property
    def name(self) -> str:
        """The kernel's name of the device."""
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.subsystem} {self.action} {self.name}"


def change_of(event: Uevent, *, virtual_links: bool = False) -> Change | None:
    """Say what an event is about; None for nothing that a scan shows.

    Interfaces that no hardware stands behind (every pod's veth) are nothing, unless `virtual_links`
    asks for them.
    """
    function = next((part for part in reversed(event.path.split("/")) if is_pci_address(part)), None)
    if event.subsystem == "pci":
        return of_function(function, bus=event.action in _COMES_OR_GOES) if function is not None else EVERYTHING
    if function is not None:
        return of_function(function)
    if event.subsystem == "net":
        if event.path.startswith(_VIRTUAL_NET) and not virtual_links:
            return None
        return of_netdev(event.name)
    if event.subsystem == "misc" and event.name not in _MISC:
        return None
    return EVERYTHING  # software RDMA, which belongs to the function of its interface; a module's device
