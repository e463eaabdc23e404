"""Which units of one resource a container should get, as kubelet asks for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from agent.placement.distances import Distances
from agent.placement.gpus import choose_gpus
from agent.placement.nics import NOTHING, match_ports


class Layout:
    """Where all units of one resource are. Made once per snapshot, so that a choice is quick."""

    def __init__(
        self, distances: Distances, devices: Mapping[str, str], *, spread: bool = True, bonded: bool = False
    ) -> None:
        """Unit ID → PCI address, or UUID of a GPU or MIG device; empty for a slot, whose device is chosen later.

        Without `spread` one adapter is filled before another. Of `bonded` ones pairs are made, over two adapters.
        """
        self.spread, self.bonded = spread, bonded
        self.distances = distances
        self.device = devices
        self.rank = {unit: rank for rank, unit in enumerate(sorted(devices, key=self._order))}
        """Natural order: `…-2` before `…-10`, VF index order before text order."""
        self.adapter = {unit: distances.port(devices[unit]) for unit in self.rank}
        """Where a unit's bandwidth comes from: the PF behind a VF, a GPU, else the device itself."""
        self._units_of = Counter(devices.values())
        self.offered = Counter(self.adapter.values())
        self.of_gpus = bool(devices) and all(map(distances.gpu, devices.values()))
        """The units are GPUs, or parts of GPUs."""

    def gpu_name(self, unit_id: str) -> str:
        """Name a GPU's unit as placement knows it: by its device, or as one of the device's replicas."""
        device = self.device[unit_id]
        return device if self._units_of[device] == 1 else f"{device}::{unit_id}"

    def load(self, available: Iterable[str]) -> dict[str, int]:
        """Count each adapter's units that are not available."""
        free = Counter(self.adapter[unit] for unit in available if unit in self.adapter)
        return {adapter: offered - free[adapter] for adapter, offered in self.offered.items()}

    def _order(self, unit: str) -> tuple[str, int, str, int, str]:
        place, index, _ = self.distances.order(self.device[unit])
        head, _, tail = unit.rpartition("-")
        return place, index, head, int(tail) if tail.isdecimal() else -1, unit


def choose(
    layout: Layout,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    near: Sequence[str] = (),
    *,
    partners: Sequence[str] = (),
    count: int | None = None,
    load: Mapping[str, int] = NOTHING,
) -> tuple[str, ...]:
    """Choose `size` of the available unit IDs, those that must be included among them and first.

    `near` are the devices that the choice should be close to: GPUs for NICs, NICs for GPUs, each of which should
    get a device of its own. `partners` are devices that are free and will be wanted next: free NICs for a
    choice of GPUs, free GPUs for a choice of NICs; `count` of them, as far as that can be told (default: as many as
    units). `load` counts what is in use of the partners' ports.
    Always answers; with fewer IDs if fewer are there.
    """
    count = size if count is None else count
    must = list(dict.fromkeys(must_include))[: max(size, 0)]
    known = sorted((u for u in set(available).difference(must) if u in layout.rank), key=layout.rank.__getitem__)
    fill = size - len(must)
    if fill <= 0 or not known:
        chosen: list[str] = []
    elif layout.of_gpus:
        chosen = _gpus(layout, known, must, size, near or partners, len(near) or count, load)
    elif near:
        chosen = _nics(layout, known, must, size, near, partners)
    elif partners:
        nics = [layout.device[u] for u in (*must, *known) if u in layout.device]
        gpus = _partners(layout, partners, count, nics, layout.load((*known, *must)), size)
        chosen = _nics(layout, known, must, size, gpus, [p for p in partners if p not in gpus])
    else:
        chosen = _apart(layout, known, must, size)
    taken = {*must, *chosen}
    rest = [unit for unit in dict.fromkeys(available) if unit not in taken]
    return (*must, *chosen, *rest[: max(fill - len(chosen), 0)])


def _partners(
    layout: Layout, free: Sequence[str], count: int, nics: Sequence[str], load: Mapping[str, int], size: int
) -> tuple[str, ...]:
    """Choose the GPUs that so many NICs are for. Where too few count as free, others have come back unheard of."""
    if len(free) >= count:
        return choose_gpus(layout.distances, free, (), count, nics, load, size)
    places = {layout.distances.port(gpu) for gpu in free}
    others = [gpu for gpu in layout.distances.gpus if gpu not in places]
    return choose_gpus(layout.distances, [*free, *others], free, count, nics, load, size)


def _gpus(
    layout: Layout,
    known: Sequence[str],
    must: Sequence[str],
    size: int,
    nics: Sequence[str],
    count: int,
    load: Mapping[str, int],
) -> list[str]:
    """Choose GPUs that get so many NICs. Several units of one device are its replicas."""
    units = {layout.gpu_name(unit): unit for unit in (*must, *known) if unit in layout.rank}
    free = [layout.gpu_name(unit) for unit in known]
    included = [layout.gpu_name(unit) for unit in must if unit in layout.rank]
    # Unknown units that must be included have no place, but take up theirs.
    size -= len(must) - len(included)
    load = {**load, **layout.load((*known, *must))}
    found = choose_gpus(layout.distances, free, included, size, nics, load, count)
    return [units[name] for name in found if name not in included]


def _nics(
    layout: Layout,
    known: Sequence[str],
    must: Sequence[str],
    size: int,
    near: Sequence[str],
    partners: Sequence[str],
) -> list[str]:
    """Match adapters to devices, then take the first free unit of each."""
    units: dict[str, list[str]] = {}
    for unit in reversed(known):
        units.setdefault(layout.adapter[unit], []).append(unit)
    included = Counter(layout.adapter[unit] for unit in must if unit in layout.adapter)
    room = Counter({adapter: len(free) for adapter, free in units.items()}) + included
    if layout.bonded and size % 2 == 0:
        room = Counter({adapter: min(n, max(size // 2, included[adapter])) for adapter, n in room.items()})
    size -= len(must) - included.total()
    load = layout.load((*known, *must))
    spare = partners or None
    ports = match_ports(
        layout.distances, near, room, size, load, spare_gpus=spare, forced=included, spread=layout.spread
    )
    chosen = []
    for port in ports:
        if included[port]:
            included[port] -= 1
        else:
            chosen.append(units[port].pop())
    return chosen


def _apart(layout: Layout, known: Sequence[str], must: Sequence[str], size: int) -> list[str]:
    """Take units on different adapters near each other, of the least loaded ones; or fill one after the other."""
    free: dict[str, list[str]] = {}
    for unit in reversed(known):
        free.setdefault(layout.adapter[unit], []).append(unit)
    load = layout.load(known)
    peers = [layout.adapter[unit] for unit in must if unit in layout.adapter]
    chosen: list[str] = []
    while free and len(must) + len(chosen) < size:

        def cost(adapter: str) -> tuple[int, int, int, int]:
            distance = sum(layout.distances.between(adapter, peer) for peer in peers)
            there, loaded = peers.count(adapter), load[adapter]
            if not layout.spread:
                there, loaded = -there, -loaded
            return there, distance, loaded, layout.rank[free[adapter][-1]]

        best = min(free, key=cost)
        chosen.append(free[best].pop())
        peers.append(best)
        load[best] += 1
        if not free[best]:
            del free[best]
    return chosen
