"""Made-up hosts for placement: any PCI tree, any NVLinks, any NUMA nodes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from hypothesis import strategies as st

from agent.model.device import Gpu, MigDevice, NumaNode, PciDevice, Snapshot
from agent.model.locality import Locality
from agent.placement import Distances
from tests.node import pci


def uuid(number: int) -> str:
    """Name the number-th GPU."""
    return f"GPU-{number:08x}-0000-0000-0000-000000000000"


@dataclass
class Host:
    """A host under construction. Paths are host bridges and bridges below them, top first."""

    devices: list[PciDevice] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    numa_nodes: tuple[NumaNode, ...] = (NumaNode(0, (0,), 1), NumaNode(1, (1,), 1))

    def _add(self, path: Sequence[str], numa_node: int, pci_class: int, **more: object) -> str:
        address = f"0000:{len(self.devices) // 32 + 1:02x}:{len(self.devices) % 32:02x}.0"
        self.devices.append(pci(address, tuple(path), numa_node, pci_class=pci_class, vendor=0, **more))
        return address

    def nic(self, path: Sequence[str], numa_node: int = 0, vfs: int = 0) -> str:
        """Add a PF with VFs; give its address."""
        pf = self._add(path, numa_node, 0x020000, sriov_totalvfs=vfs)
        for index in range(vfs):
            self._add(path, numa_node, 0x020000, physfn=pf, vf_index=index)
        return pf

    def gpu(
        self,
        path: Sequence[str],
        numa_node: int = 0,
        *,
        nvlinks: Sequence[tuple[int, int]] = (),
        parts: int = 0,
    ) -> str:
        """Add a GPU with NVLinks to others (number, links) and MIG devices; give its UUID."""
        number = len(self.gpus)
        address = self._add(path, numa_node, 0x030200)
        mig = tuple(MigDevice(f"MIG-{number}-{i}", "1g.10gb", i, 0, 1) for i in range(parts))
        links = tuple(sorted((uuid(peer), n) for peer, n in nvlinks))
        self.gpus.append(
            Gpu(uuid(number), number, number, address, "GPU", 1, nvlinks=links, mig_mode=parts > 0, mig_devices=mig)
        )
        return uuid(number)

    def snapshot(self) -> Snapshot:
        return Snapshot(devices=tuple(self.devices), gpus=tuple(self.gpus), numa_nodes=self.numa_nodes)


@st.composite
def hosts(draw: st.DrawFn, *, gpus: int = 5, nics: int = 4) -> Snapshot:
    """Draw a small host: devices anywhere in a tree of four host bridges, with two levels of switches."""
    host = Host()

    def path() -> tuple[str, ...]:
        bridge = draw(st.integers(0, 3))
        down = draw(st.lists(st.integers(0, 1), max_size=4))
        return (f"pci0000:{bridge:02x}", *(f"{bridge}{''.join(map(str, down[: i + 1]))}" for i in range(len(down))))

    unknown = draw(st.booleans())

    def numa_node(place: tuple[str, ...]) -> int:
        return -1 if unknown else int(place[0][-1]) // 2

    for number in range(draw(st.integers(1, gpus))):
        place = path()
        links = [(peer, n) for peer in range(number) if (n := draw(st.sampled_from([0, 0, 4, 8])))]
        host.gpu(place, numa_node(place), nvlinks=links)
    for _ in range(draw(st.integers(0, nics))):
        place = path()
        host.nic(place, numa_node(place), vfs=draw(st.integers(0, 3)))
    return host.snapshot()


class AnyDistances(Distances):
    """A host whose distances are drawn, not those of a tree: harder to choose on than any real one."""

    def __init__(self, snapshot: Snapshot, localities: Mapping[frozenset[str], Locality]) -> None:
        super().__init__(snapshot)
        self._drawn = localities

    def _locality(self, a: str, b: str) -> Locality:
        return Locality.SELF if a == b else self._drawn[frozenset((a, b))]


@st.composite
def any_distances(draw: st.DrawFn, *, gpus: int = 6, nics: int = 4) -> tuple[AnyDistances, list[str]]:
    """Draw GPUs and the VFs of some NICs at any distances; give the distances and what can be taken."""
    host = Host()
    for number in range(draw(st.integers(2, gpus))):
        host.gpu(
            (f"pci0000:{number:02x}",), 0, nvlinks=[(p, n) for p in range(number) if (n := draw(st.integers(0, 1)))]
        )
    free: list[str] = []
    for number in range(draw(st.integers(2, nics))):
        vfs = draw(st.integers(1, 2))
        host.nic((f"pci0000:{gpus + number:02x}",), 0, vfs=vfs)
        free += [device.address for device in host.devices[-vfs:]]
    snapshot = host.snapshot()
    places = [*(g.uuid for g in snapshot.gpus), *(d.address for d in snapshot.devices if d.sriov_totalvfs)]
    # Of one number, since many small draws tend to be all alike.
    chance = random.Random(draw(st.integers(0, 1 << 32)))
    near = [Locality.PIX, Locality.PXB, Locality.PHB, Locality.NODE, Locality.SYS]
    drawn = {frozenset(two): chance.choice(near) for two in combinations(places, 2)}
    return AnyDistances(snapshot, drawn), free
