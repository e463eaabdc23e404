"""Kernel uevents taken apart, and what each of them is worth looking at. Pure.

A message is `ACTION@DEVPATH`, then `NAME=value` texts, each ended by a zero byte (lib/kobject_uevent.c).
udevd sends others to a group of its own, with a header that begins with `libudev`.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.model.change import EVERYTHING, Change, of_function, of_netdev
from agent.model.device import is_pci_address

_VIRTUAL_NET = "/devices/virtual/net/"
_RDMA_CLASSES = frozenset({"infiniband", "infiniband_verbs", "infiniband_mad"})
_COMES_OR_GOES = frozenset({"add", "remove", "change", "move"})
"""What they may do to the PCI bus; `change` ends the making of VFs (drivers/pci/iov.c, sriov_enable)."""
_WANTED = tuple(f"SUBSYSTEM={name}".encode() for name in ("pci", "net", "vdpa", "misc", *sorted(_RDMA_CLASSES)))


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


def parse(packet: bytes) -> Uevent | None:
    """Read a kernel message about a subsystem that the scan looks at; None for all others.

    A device that moves brings along an event for each of its queues: these are sorted out first.
    """
    texts = packet.split(b"\0")
    if not any(wanted in texts for wanted in _WANTED):
        return None
    found = dict(text.decode("utf-8", "replace").partition("=")[::2] for text in texts[1:])
    if "ACTION" not in found or "DEVPATH" not in found:
        return None
    return Uevent(found["ACTION"], found["DEVPATH"], found["SUBSYSTEM"])


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
    if event.subsystem == "misc" and event.name != "rdma_cm":
        return None
    return EVERYTHING  # software RDMA, which belongs to the function of its interface; rdma_cm
