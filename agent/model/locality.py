"""How near two devices are, from their PCI paths and NUMA nodes.

The words are those of `nvidia-smi topo -m`; a smaller value is nearer.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

from agent.model.cloud_topology import Places
from agent.model.device import NO_NUMA_NODE, PciDevice


class Locality(IntEnum):
    SELF = 0
    PIX = 1
    """At most one PCIe switch (or bridge) between them."""
    PXB = 2
    """Several switches, all below one root port."""
    PHB = 3
    """Through the host bridge: the same root complex."""
    NODE = 4
    """Between host bridges of one NUMA node."""
    SYS = 5
    """Across the link between NUMA nodes (or unknown)."""


def locality(a: PciDevice, b: PciDevice, *, one_numa_node: bool = False) -> Locality:
    """Tell how near two PCI devices are. `one_numa_node` says that the node has no second one.

    A VF's PCI path ends at its PF's port, so a VF is exactly as near as its PF.
    Unknown NUMA nodes (-1) on different host bridges count as SYS: nothing says they are near. Firmware that
    describes no NUMA says -1 for every device, though, and then they all are on the one node that there is.
    """
    if a.address == b.address:
        return Locality.SELF
    if a.path[:1] != b.path[:1]:
        if a.numa_node == b.numa_node and (one_numa_node or a.numa_node != NO_NUMA_NODE):
            return Locality.NODE
        return Locality.SYS
    if a.path[1:2] != b.path[1:2]:
        return Locality.PHB
    # Below the shared bridge hangs a switch's internal bus. One bridge down to each device
    # is one switch; more bridges on either side are more switches.
    return Locality.PIX if bridges(a, b) <= 2 else Locality.PXB


def standing(device: PciDevice, places: Places) -> PciDevice:
    """Put a device where it stands, if the PCI tree does not tell and something else does."""
    if device.address not in places.of:
        return device
    way, numa_node = places.of[device.address]
    return replace(device, path=way, numa_node=numa_node if device.numa_node == NO_NUMA_NODE else device.numa_node)


def bridges(a: PciDevice, b: PciDevice) -> int:
    """Count the bridges between two devices: those on the ways down to them from where the ways part."""
    common = 0
    for x, y in zip(a.path, b.path, strict=False):
        if x != y:
            break
        common += 1
    return len(a.path) + len(b.path) - 2 * (common + 1)
