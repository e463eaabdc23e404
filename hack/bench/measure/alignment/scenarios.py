"""A node file → the resources that its pods ask for. Pure but for reading files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent.config import Resource, Select
from agent.hardware import sysfs
from agent.model.device import PciDevice, Snapshot
from agent.sim import recorded

GPU, NIC = "nvidia.com/gpu", "rdma/nic"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A node, and what a NIC is on it."""

    node: str
    nics: str
    """`all VFs`, `one VF per port` or `whole HCAs`."""
    snapshot: Snapshot
    devices: tuple[str, ...]
    """PCI addresses of the NICs."""

    @property
    def binds_late(self) -> bool:
        """Tell whether late binding can be had: HCAs are handed out whole or shared, early."""
        return self.nics != "whole HCAs"

    def resources(self, binding: str) -> tuple[Resource, ...]:
        """Make the configuration's resources."""
        select = Select(pci_addresses=self.devices)
        if self.nics == "whole HCAs":
            nic = Resource(NIC, "hca", select=select, shares=1)
        else:
            nic = Resource(NIC, "vf", select=select, binding=binding)
        return Resource(GPU, "gpu"), nic


def scenarios(file: Path, folder: Path) -> Iterator[Scenario]:
    """Lay a node file out in an empty folder, scan it and list what can be played on it.

    Nothing on a node without GPUs or without RDMA.
    """
    node = recorded.load(file)
    recorded.unpack(node, folder)
    scanned = sysfs.scan(folder)
    snapshot = Snapshot(
        devices=scanned.devices, gpus=node.gpus, numa_nodes=scanned.numa_nodes, boot_id=scanned.boot_id, generation=1
    )
    if not node.gpus:
        return
    pfs = [d for d in snapshot.devices if d.rdma_devices and not d.is_vf and _is_up(d)]
    every = tuple(vf for pf in pfs for vf in pf.vfs)
    if every:
        yield Scenario(node.name, "all VFs", snapshot, every)
        yield Scenario(node.name, "one VF per port", snapshot, tuple(pf.vfs[0] for pf in pfs if pf.vfs))
    elif pfs:
        yield Scenario(node.name, "whole HCAs", snapshot, tuple(pf.address for pf in pfs))


def _is_up(device: PciDevice) -> bool:
    return any(port.state == "ACTIVE" for rdma in device.rdma_devices for port in rdma.ports)
