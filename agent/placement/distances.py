"""How near the GPUs and NICs of one node are to each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from agent.model.device import NO_NUMA_NODE, Gpu, PciDevice, Snapshot
from agent.model.gpu_ids import gpu_name
from agent.model.locality import Locality, bridges, locality, standing
from agent.model.unit_id import UnitId, UnitKind

LOCAL = 10
"""ACPI's distance of a NUMA node to itself (SLIT)."""
UNKNOWN = 255
"""ACPI's distance of nodes that cannot reach each other: what nothing is known of comes last."""
NOWHERE: Mapping[tuple[str, str], int] = MappingProxyType({})
_NUMA = "numa:"
"""What begins the name of a place that is a NUMA node."""
FINE = 1 << 20
"""What a locality weighs in a span: more than all that tells pairs of one locality apart, over all pairs of a node."""


def _nothing_given(_: str) -> Iterable[str]:
    return ()


class Distances:
    """Distances on one node. Made once per snapshot; each distance is worked out once.

    A VF is where its PF is. Towards GPUs a PF with a Data Direct function is where that function is; of one whose
    function is not known only the NUMA node counts. What is not on the node is far from everything.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        gpus = snapshot.all_gpus
        self.gpus = tuple(gpu.uuid for gpu in gpus)
        """UUIDs of all GPUs, in the driver's order; then PCI addresses of those that only sysfs shows."""
        self._ranks = {uuid: rank for rank, uuid in enumerate(self.gpus)}
        self._devices = snapshot.by_address
        self._standing = {
            address: standing(self._devices[address], snapshot.places)
            for address in snapshot.places.of
            if address in self._devices
        }
        self._data_direct = snapshot.data_direct
        self._gpu_ids = snapshot.gpu_ids
        self._gpus = snapshot.gpu_by_uuid
        self._names = {name: gpu.uuid for gpu in gpus for name in _names(gpu)}
        self._links: dict[tuple[str, str], int] = {}
        for gpu in gpus:
            for peer, links in gpu.nvlinks:
                # One end may not answer while its link is down.
                for key in ((gpu.uuid, peer), (peer, gpu.uuid)):
                    self._links[key] = max(links, self._links.get(key, 0))
        self._one_node = len(snapshot.numa_nodes) <= 1
        self._slit = {node.number: node.distances for node in snapshot.numa_nodes}
        self._numbers = tuple(sorted(self._slit))
        self._localities: dict[tuple[str, str], Locality] = {}
        self._spans: dict[tuple[str, str], int] = {}

    def gpu(self, name: str) -> str | None:
        """Find a GPU's UUID by any name that GPU plugins use for it or a part of it.

        UUID, MIG UUID (also the old form `MIG-GPU-…/gi/ci`), index (`0`, MIG `0:1`), `nvidia0` and
        `nvidia0/gi1`, PCI address, also a VF's; what another vendor's driver calls it; each also as a
        replica (`…::2`).
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
            virtual = self._devices.get(whole)
            if virtual is not None and virtual.physfn is not None:
                found = self._names.get(virtual.physfn)
        return found

    def gpus_of(
        self,
        units: Iterable[tuple[str, str]],
        own: Collection[str] = (),
        numa_nodes: Mapping[tuple[str, str], int] = NOWHERE,
        files: Callable[[str], Iterable[str]] = _nothing_given,
    ) -> tuple[str, ...]:
        """List the GPUs behind some units (resource name, ID), whatever plugin gave them, in the driver's order.

        `own` are names of resources that are GPUs by configuration, `numa_nodes` where kubelet says that units are,
        `files` the device files that a resource's plugin gave along with the units: asked only where an ID of another
        plugin names no GPU, since they may name it. A GPU that neither tells is, behind the others, a place that is as
        near to all that is on its NUMA node.
        """
        found, places = set[str](), []
        by_files: dict[str, set[str]] = {}
        for unit in units:
            resource_name, unit_id = unit
            name = gpu_name(resource_name, unit_id, own, self._gpu_ids)
            gpu = self.gpu(name) if name else None
            if gpu is not None:
                found.add(gpu)
            elif name is not None or UnitId.parse(unit_id).kind is UnitKind.OTHER:
                if resource_name not in by_files:
                    by_files[resource_name] = self._of_files(files(resource_name))
                found |= by_files[resource_name]
                if name is not None and not by_files[resource_name] and unit in numa_nodes:
                    places.append(f"{_NUMA}{numa_nodes[unit]}")
        return (*(gpu for gpu in self.gpus if gpu in found), *sorted(places))

    def _of_files(self, paths: Iterable[str]) -> set[str]:
        """Find the GPUs whose device files some are: /dev/accel/accel3, /dev/dri/renderD128, /dev/davinci0."""
        names = (path.rpartition("/")[2] for path in paths if path.startswith("/dev/"))
        # A bare number is a file of vfio's, and no GPU's index.
        return {self._names[name] for name in names if name in self._names and not name[0].isdigit()}

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

    def span(self, a: str, b: str) -> int:
        """Tell how far two places are apart, among pairs of one locality too: `locality * FINE + finer`.

        Of pairs below several switches (PXB) those are nearer that have fewer bridges between them: some GPUs bring
        bridges of their own. Of pairs on different NUMA nodes (SYS) those whose nodes the firmware calls nearer.
        """
        found = self._spans.get((a, b))
        if found is None:
            near = self.between(a, b)
            found = self._spans[a, b] = self._spans[b, a] = near * FINE + self._finer(a, b, near)
        return found

    def nearest(self, place: str, others: Sequence[str]) -> tuple[str, ...]:
        """List those of other places that are nearest to one; none where another may be nearer than it is known."""
        unknown = self._data_direct.unknown
        known = [other for other in others if self.is_known(place, other)] if unknown else others
        spans = [self.span(place, other) for other in known]
        least = min(spans, default=0)
        if len(known) < len(others) and least >= Locality.PHB * FINE:
            return ()
        return tuple(other for other, span in zip(known, spans, strict=True) if span == least)

    def is_known(self, a: str, b: str) -> bool:
        """Report whether it is known how near two places are: a GPU and an adapter with Data Direct may not be."""
        unknown = self._data_direct.unknown
        return not unknown or not (
            (self._is_gpu(a) and b in unknown and b not in self._standing)
            or (self._is_gpu(b) and a in unknown and a not in self._standing)
        )

    def links(self, a: str, b: str) -> int:
        """Count the NVLinks, or xGMI links, between two GPUs, given by UUID."""
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

    def _between_nodes(self, here: int, there: int) -> int:
        if here == there:
            return LOCAL if here != NO_NUMA_NODE or self._one_node else UNKNOWN
        row = self._slit.get(here, ())
        if there in self._slit and len(row) == len(self._numbers):
            return row[self._numbers.index(there)]
        return UNKNOWN

    def _finer(self, a: str, b: str, near: Locality) -> int:
        here, there = self._ends(a, b)
        if near is Locality.SYS:
            if here is None or there is None:
                return UNKNOWN
            return self._between_nodes(here.numa_node, there.numa_node)
        return bridges(here, there) if near is Locality.PXB and here is not None and there is not None else 0

    def _locality(self, a: str, b: str) -> Locality:
        if a == b:
            return Locality.SELF
        here, there = self._ends(a, b)
        if here is None or there is None:
            return Locality.SYS
        return locality(here, there, one_numa_node=self._one_node)

    def _ends(self, a: str, b: str) -> tuple[PciDevice | None, PciDevice | None]:
        """Find where the traffic between two places enters and leaves PCI; None for what is not on the node."""
        if self._is_gpu(a):
            return self._pci(a), self._towards_gpus(b)
        return (self._towards_gpus(a) if self._is_gpu(b) else self._pci(a)), self._pci(b)

    def _is_gpu(self, place: str) -> bool:
        """Report whether a place is a GPU, of any vendor, or stands for one of which only the NUMA node is known."""
        return place in self._gpus or place.startswith(_NUMA)

    def _towards_gpus(self, place: str) -> PciDevice | None:
        if place in self._standing:
            return self._standing[place]
        found = self._pci(self._data_direct.of.get(place, place))
        if found is not None and place in self._data_direct.unknown:
            return replace(found, path=(place,))
        return found

    def _pci(self, place: str) -> PciDevice | None:
        gpu = self._gpus.get(place)
        address = gpu.pci_address if gpu is not None else place
        found = self._standing.get(address) or self._devices.get(address)
        if found is None and place.startswith(_NUMA):
            return PciDevice(place, (place,), 0, 0, 0, None, int(place.removeprefix(_NUMA)), None)
        return found


def _names(gpu: Gpu) -> Iterator[str]:
    yield gpu.uuid
    yield gpu.pci_address
    yield from gpu.names
    if gpu.uuid == gpu.pci_address:
        return
    yield str(gpu.index)
    yield f"nvidia{gpu.index if gpu.minor is None else gpu.minor}"
    for part in gpu.mig_devices:
        yield part.uuid
