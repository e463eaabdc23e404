"""How near the GPUs and NICs of one node are to each other."""

from __future__ import annotations

from collections.abc import Iterator

from agent.model.device import NO_NUMA_NODE, Gpu, PciDevice, Snapshot
from agent.model.topology import Locality, locality

LOCAL = 10
"""ACPI's distance of a NUMA node to itself (SLIT)."""
UNKNOWN = 255
"""ACPI's distance of nodes that cannot reach each other: what nothing is known of comes last."""


class Terrain:
    """Distances on one node. Made once per snapshot; each distance is worked out once.

    A VF is where its PF is. What is not on the node is far from everything.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.gpus = tuple(gpu.uuid for gpu in sorted(snapshot.gpus, key=lambda gpu: gpu.index))
        """UUIDs of all GPUs, in the driver's order."""
        self._ranks = {uuid: rank for rank, uuid in enumerate(self.gpus)}
        self._devices = snapshot.by_address
        self._gpus = snapshot.gpu_by_uuid
        self._names = {name: gpu.uuid for gpu in snapshot.gpus for name in _names(gpu)}
        self._links: dict[tuple[str, str], int] = {}
        for gpu in snapshot.gpus:
            for peer, links in gpu.nvlinks:
                # One end may not answer while its link is down.
                for key in ((gpu.uuid, peer), (peer, gpu.uuid)):
                    self._links[key] = max(links, self._links.get(key, 0))
        self._one_node = len(snapshot.numa_nodes) <= 1
        self._slit = {node.number: node.distances for node in snapshot.numa_nodes}
        self._numbers = tuple(sorted(self._slit))
        self._localities: dict[tuple[str, str], Locality] = {}

    def gpu(self, name: str) -> str | None:
        """Find a GPU's UUID by any name that GPU plugins use for it or a part of it.

        UUID, MIG UUID (also the old form `MIG-GPU-…/gi/ci`), index (`0`, MIG `0:1`), `nvidia0` and
        `nvidia0/gi1`, PCI address; each also as a replica (`…::2`).
        """
        whole = name.partition("::")[0]
        found = self._names.get(whole)
        if found is None and whole.startswith("MIG-GPU-"):
            found = self._names.get(whole.removeprefix("MIG-").partition("/")[0])
        if found is None and "/gi" in whole:
            found = self._names.get(whole.partition("/")[0])
        if found is None and ":" in whole:
            index, _, part = whole.partition(":")
            found = self._names.get(index) if part.isdecimal() else None
        return found

    def port(self, device: str) -> str:
        """Name the place that a device stands for: a VF's PF, a GPU part's GPU, else the device itself."""
        pci = self._devices.get(device)
        if pci is not None:
            return self._names.get(device) or pci.physfn or device
        return self.gpu(device) or device

    def distance(self, a: str, b: str) -> Locality:
        """Tell how near two devices are; SYS for what is not on the node."""
        return self.between(self.port(a), self.port(b))

    def between(self, a: str, b: str) -> Locality:
        """Tell how near two places (see `port`) are."""
        found = self._localities.get((a, b))
        if found is None:
            found = self._localities[a, b] = self._localities[b, a] = self._locality(a, b)
        return found

    def links(self, a: str, b: str) -> int:
        """Count the NVLinks between two GPUs, given by UUID."""
        return self._links.get((a, b), 0)

    def order(self, device: str) -> tuple[str, int, str]:
        """Sort key: VFs of one PF by their index, which addresses do not follow; else by address."""
        pci = self._devices.get(device)
        if pci is None or pci.vf_index is None:
            return device, -1, device
        return pci.physfn or device, pci.vf_index, device

    def gpu_order(self, name: str) -> tuple[int, int, str]:
        """Sort key: the driver's order of GPUs, then natural order of their parts and replicas."""
        return self._ranks.get(self.port(name), len(self._ranks)), len(name), name

    def numa_node(self, device: str) -> int:
        """Tell a device's NUMA node; -1 if nothing is known."""
        pci = self._pci(self.port(device))
        return NO_NUMA_NODE if pci is None else pci.numa_node

    def numa_distance(self, a: str, b: str) -> int:
        """Tell how far the memory of two places is apart: 10 on one NUMA node, 255 if nothing is known.

        Parts of one socket (sub-NUMA clusters, NPS) are nearer than two sockets.
        """
        here, there = self.numa_node(a), self.numa_node(b)
        if here == there:
            return LOCAL if here != NO_NUMA_NODE or self._one_node else UNKNOWN
        row = self._slit.get(here, ())
        if there in self._slit and len(row) == len(self._numbers):
            return row[self._numbers.index(there)]
        return UNKNOWN

    def _locality(self, a: str, b: str) -> Locality:
        if a == b:
            return Locality.SELF
        here, there = self._pci(a), self._pci(b)
        if here is None or there is None:
            return Locality.SYS
        return locality(here, there, one_numa_node=self._one_node)

    def _pci(self, place: str) -> PciDevice | None:
        gpu = self._gpus.get(place)
        return self._devices.get(gpu.pci_address if gpu is not None else place)


def _names(gpu: Gpu) -> Iterator[str]:
    yield gpu.uuid
    yield gpu.pci_address
    yield str(gpu.index)
    yield f"nvidia{gpu.index if gpu.minor is None else gpu.minor}"
    for part in gpu.mig_devices:
        yield part.uuid
