"""The GPUs to choose from as numbers: groups of those that are alike, and what any two of them cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from agent.model.topology import Locality
from agent.placement.assignment import assign
from agent.placement.nics import pair
from agent.placement.terrain import Terrain

# The terms of a cost, each wide enough never to reach into the next.
_SHARED = 1 << 40
_NIC_LOAD, _NEAR_LEFT, _LINKS_LEFT, _LOCALITY, _USED = 1, 1 << 24, 1 << 48, 1 << 72, 1 << 96


@dataclass
class Group:
    """GPUs that are alike in everything that counts, or parts of one GPU."""

    places: list[str]
    """UUIDs: one for each unit, or a single one for all of them."""
    names: list[str]
    """The units that are free, in the driver's order."""
    taken: int = 0
    """How many units must be included besides."""
    nearest: Locality = Locality.SELF
    """Of the ports with a free NIC."""
    alone: int = 0
    """What a unit costs by itself, in the last number of a cost."""

    @property
    def units(self) -> int:
        return self.taken + len(self.names)

    def place(self, index: int) -> str:
        """Name the GPU of the index-th unit."""
        return self.places[index] if len(self.places) > 1 else self.places[0]


@dataclass
class Choices:
    """All that the search needs. A pair's costs are by two groups; a group and itself: two of its units."""

    terrain: Terrain
    groups: list[Group]
    size: int
    room: Mapping[str, int]
    """Port → free NICs."""
    first: list[list[int]] = field(default_factory=list)
    """Shared GPUs and missing NVLinks: what is settled before any NIC."""
    last: list[list[int]] = field(default_factory=list)
    """Locality: what is settled after the NICs."""
    contended: bool = False
    """GPUs are in each other's way at their nearest ports: only a matching tells what a set's pairs are."""
    bound: tuple[int, int] = (0, 0)
    """The worst pair and the sum of pairs that no set is better than."""
    bounding: tuple[int, ...] = ()
    """Units of each group that have such pairs, whatever else they cost; empty if nothing is contended."""
    matchings: int = 0
    """How many were made: they take most of the time."""
    _solved: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)

    @property
    def pairs(self) -> int:
        """How many GPUs get a NIC."""
        return min(self.size, sum(self.room.values()))

    def matched(self, counts: Sequence[int]) -> tuple[int, int]:
        """Give the worst pair and the sum of the best pairs of a set, or of the beginning of one."""
        if not self.pairs:
            return 0, 0
        if not self.contended:
            near = sorted(g.nearest for g, n in zip(self.groups, counts, strict=True) for _ in range(n))[: self.pairs]
            return near[-1], sum(near)
        key = tuple(counts)
        if key not in self._solved:
            self.matchings += 1
            places = [g.place(i) for g, n in zip(self.groups, counts, strict=True) for i in range(n)]
            self._solved[key] = _worst_and_sum(pair(self.terrain, places, self.room, self.pairs))
        return self._solved[key]

    def names(self, counts: Sequence[int]) -> list[str]:
        """Name the units behind the counts, without those that must be included anyway."""
        chosen = [name for g, n in zip(self.groups, counts, strict=True) for name in g.names[: n - g.taken]]
        return sorted(chosen, key=self.terrain.gpu_order)


def collect(
    terrain: Terrain,
    free: Sequence[str],
    must: Sequence[str],
    size: int,
    room: Mapping[str, int],
    load: Mapping[str, int],
) -> Choices:
    """Group the GPUs and work out what they cost."""
    single: dict[str, Group] = {}
    for name in sorted({*free, *must}, key=terrain.gpu_order):
        place = terrain.port(name)
        group = single.setdefault(place, Group([place], []))
        if name in must:
            group.taken += 1
        else:
            group.names.append(name)
    shared = {terrain.port(name) for name in free if "::" in name}
    ports = [port for port, units in room.items() if units > 0]
    costs = _Costs(terrain, list(single), shared, {p: g.units for p, g in single.items()})
    for place, group in single.items():
        distances = [terrain.between(place, port) for port in ports]
        group.nearest = min(distances, default=Locality.SELF)
        nearest = [load.get(p, 0) for p, d in zip(ports, distances, strict=True) if d == group.nearest]
        group.alone = _USED * load.get(place, 0) + costs.left_behind(place) + _NIC_LOAD * min(nearest, default=0)
    contended = bool(ports) and not _all_nearest(terrain, list(single.values()), room, size)
    groups = _alike(terrain, list(single.values()), costs, ports if contended else ())
    groups.sort(key=lambda g: (not g.taken, g.nearest))
    choices = Choices(terrain, groups, size, room, contended=contended)
    for a in groups:
        choices.first.append([costs.first(a.places[0], b.places[-1]) for b in groups])
        choices.last.append([costs.last(a.places[0], b.places[-1]) for b in groups])
    if ports:
        _bound(choices)
    return choices


class _Costs:
    """What two units cost, by the GPUs that they are of."""

    def __init__(self, terrain: Terrain, places: Sequence[str], shared: set[str], units: Mapping[str, int]) -> None:
        self._terrain = terrain
        self._shared = shared
        self._units = units
        self._most = max((terrain.links(a, b) for a, b in combinations(terrain.gpus, 2)), default=0)

    def first(self, a: str, b: str) -> int:
        if a == b:
            return _SHARED if a in self._shared else 0
        return self._most - self._terrain.links(a, b)

    def last(self, a: str, b: str) -> int:
        return _LOCALITY * self._terrain.between(a, b)

    def left_behind(self, place: str) -> int:
        """Weigh the free units near a GPU. What stays free is hurt least where there are few of them."""
        near = links = 0
        for other, units in self._units.items():
            if other == place:
                near += 0 if place in self._shared else Locality.SYS * (units - 1)
            else:
                near += (Locality.SYS - self._terrain.between(place, other)) * units
                links += self._terrain.links(place, other) * units
        return _LINKS_LEFT * links + _NEAR_LEFT * near


def _all_nearest(terrain: Terrain, groups: Sequence[Group], room: Mapping[str, int], size: int) -> bool:
    """Tell whether all GPUs could have a NIC at their nearest distance, all at once."""
    ports = [port for port, units in room.items() if units > 0]
    rows = [g for g in groups for _ in range(min(g.units, size))]
    if len(rows) > sum(room[port] for port in ports):
        return False
    costs = [[0 if terrain.between(g.places[0], port) == g.nearest else None for port in ports] for g in rows]
    return assign(costs, [[0] * min(room[port], len(rows)) for port in ports]) is not None


def _alike(terrain: Terrain, groups: Sequence[Group], costs: _Costs, ports: Sequence[str]) -> list[Group]:
    """Join single GPUs that are as far from every other one, cost the same alone, and are as far from the ports."""
    places = [g.places[0] for g in groups]
    rows = {a: [(costs.first(a, b), terrain.between(a, b)) for b in places] for a in places}
    index = {place: i for i, place in enumerate(places)}
    joined: list[Group] = []
    for group in groups:
        home = next((g for g in joined if _twins(terrain, g, group, rows, index, ports)), None)
        if home is None:
            joined.append(group)
        else:
            home.places += group.places
            home.names += group.names
    return joined


def _twins(
    terrain: Terrain,
    home: Group,
    other: Group,
    rows: Mapping[str, Sequence[tuple[int, Locality]]],
    index: Mapping[str, int],
    ports: Sequence[str],
) -> bool:
    if home.taken or other.taken or len(other.names) != 1 or len(home.names) != len(home.places):
        return False
    a, b = home.places[0], other.places[0]
    if (home.nearest, home.alone) != (other.nearest, other.alone):
        return False
    i, j = index[a], index[b]
    here, there = rows[a], rows[b]
    inner = [rows[x][index[y]] for x, y in combinations(home.places, 2)][:1]
    if inner and inner[0] != here[j]:
        return False
    if any(x != y for n, (x, y) in enumerate(zip(here, there, strict=True)) if n not in (i, j)):
        return False
    return all(terrain.between(a, port) == terrain.between(b, port) for port in ports)


def _bound(choices: Choices) -> None:
    """Find the best pairs of all sets, whatever else such a set costs."""
    groups, size = choices.groups, choices.size
    if not choices.contended:
        near = sorted(g.nearest for g in groups for _ in range(g.units))[: choices.pairs]
        choices.bound = near[-1], sum(near)
        return
    rows = [(i, g.place(n)) for i, g in enumerate(groups) for n in range(min(g.units, size))]
    best = pair(choices.terrain, [place for _, place in rows], choices.room, choices.pairs)
    choices.bound = _worst_and_sum(best)
    used = Counter(i for (i, _), distance in zip(rows, best, strict=True) if distance is not None)
    choices.bounding = tuple(used[i] for i in range(len(groups)))


def _worst_and_sum(pairs: Sequence[Locality | None]) -> tuple[int, int]:
    found = [distance for distance in pairs if distance is not None]
    return max(found), sum(found)
