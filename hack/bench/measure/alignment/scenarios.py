"""A node file → the resources that its pods ask for. Pure but for reading files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.config import Resource, Select
from agent.errors import ConfigError
from agent.hardware import recorded
from agent.hardware.adapter_ids import with_adapter_ids
from agent.hardware.sysfs import scan as sysfs
from agent.model.device import PciDevice, Snapshot
from agent.placement import Distances
from hack import node_pairs
from hack.node_pairs import Pairs
from measure.alignment.score import Documented

GPU, OTHER_GPU, NIC = "nvidia.com/gpu", "amd.com/gpu", "rdma/nic"
ALL_VFS, WHOLE = "all VFs", "whole HCAs"


@dataclass(frozen=True)
class Scenario:
    """A node, and what a NIC is on it."""

    node: str
    nics: str
    """`all VFs`, `one VF per port` or `whole HCAs`."""
    snapshot: Snapshot
    """GPUs that only sysfs shows stand beside those of NVML, as if a device plugin of ours handed them out, too."""
    devices: tuple[str, ...]
    """PCI addresses of the NICs."""
    has_nvml: bool = True
    """Whether there are GPUs of which NVML tells."""
    pairs: Pairs | None = None
    """What documents say of the node; None if it has no pairs file."""
    distances: Distances = field(init=False, compare=False)
    truth: Documented | None = field(init=False, compare=False)
    """Distances by documented pairs; None if there are none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "distances", Distances(self.snapshot))
        nics = self.pairs.nics if self.pairs is not None else {}
        object.__setattr__(self, "truth", Documented(self.snapshot, nics) if nics else None)

    def resources(self, binding: str, *, other_plugin: bool = False) -> tuple[Resource | str, Resource]:
        """Make the configuration's resources, or name that of another plugin: GPUs, NICs."""
        select = Select(pci_addresses=self.devices)
        if self.nics == WHOLE:
            nic = Resource(NIC, "hca", select=select, shares=1, binding=binding)
        else:
            nic = Resource(NIC, "vf", select=select, binding=binding)
        return OTHER_GPU if other_plugin else Resource(GPU, "gpu"), nic


def scenarios(file: Path, folder: Path) -> Iterator[Scenario]:
    """Lay a node file out in an empty folder, scan it and list what can be played on it.

    Nothing on a node without GPUs or without RDMA. Raises ConfigError if its pairs file does not fit it.
    """
    node = recorded.load(file)
    recorded.unpack(node, folder)
    scanned = replace(with_adapter_ids(sysfs.scan(folder), folder), gpus=node.gpus, generation=1)
    snapshot = replace(scanned, gpus=scanned.all_gpus)
    if not snapshot.gpus:
        return
    pfs = [d for d in snapshot.devices if d.rdma_devices and not d.is_vf and _is_up(d)]
    every = tuple(vf for pf in pfs for vf in pf.vfs)
    has_nvml, pairs = bool(node.gpus), _pairs(file, snapshot)
    if every:
        yield Scenario(node.name, ALL_VFS, snapshot, every, has_nvml, pairs)
        one_each = tuple(pf.vfs[0] for pf in pfs if pf.vfs)
        yield Scenario(node.name, "one VF per port", snapshot, one_each, has_nvml, pairs)
    elif pfs:
        yield Scenario(node.name, WHOLE, snapshot, tuple(pf.address for pf in pfs), has_nvml, pairs)


def _pairs(file: Path, snapshot: Snapshot) -> Pairs | None:
    """Read the pairs file beside a node file; a user's own node may have none."""
    beside = node_pairs.beside(file)
    if not beside.is_file():
        return None
    pairs = node_pairs.load(beside)
    if found := node_pairs.misfits(pairs, snapshot):
        raise ConfigError(str(beside), found)
    return pairs


def _is_up(device: PciDevice) -> bool:
    return any(port.state == "ACTIVE" for rdma in device.rdma_devices for port in rdma.ports)
