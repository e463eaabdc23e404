"""The GPUs to choose from as numbers: groups of those that are alike, and what any two of them cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

from agent.model.topology import Locality
from agent.placement.distances import FINE, Distances
from agent.placement.matching import assign
from agent.placement.nics import spans

# The terms of a cost, each wide enough never to reach into the next.
_SHARED = 1 << 40
_NIC_LOAD, _NEAR_LEFT, _LINKS_LEFT, _SPAN, _USED, _LINKS = 1, 1 << 24, 1 << 48, 1 << 72, 1 << 112, 1 << 136


@dataclass
class Group:
    """GPUs that are alike in everything that counts, or parts of one GPU."""

    places: list[str]
    """UUIDs: one for each unit, or a single one for all of them."""
    names: list[str]
    """The units that are free, in the driver's order."""
    taken: int = 0
    """How many units must be included besides."""
    nearest: int = 0
    """Span to the nearest port with a free NIC."""
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

    distances: Distances
    groups: list[Group]
    size: int
    room: Mapping[str, int]
    """Port → free NICs."""
    nics: int
    """How many of them the set gets."""
    first: list[list[int]] = field(default_factory=list)
    """Shared GPUs and missing NVLinks: what is settled before any NIC."""
    last: list[list[int]] = field(default_factory=list)
    """How far they are apart: what is settled after the NICs."""
    contended: bool = False
    """GPUs are in each other's way at their nearest ports: only a matching tells what a set's pairs are."""
    bound: tuple[int, int] = (0, 0)
    """The locality of the worst pair and the sum of the pairs' spans that no set is better than."""
    bounding: tuple[int, ...] = ()
    """Units of each group that have such pairs, whatever else they cost; empty if nothing is contended."""
    claiming: tuple[int, ...] = ()
    """Units of each group that make a good set where one after the other claims what is nearest; else empty."""
    matchings: int = 0
    """How many were made: they take most of the time."""
    _solved: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def _views(self) -> list[int]:
        """Number what the groups' GPUs look like from the ports."""
        ports, known = sorted(self.room), dict[tuple[int, ...], int]()
        seen = (tuple(self.distances.span(g.places[0], port) for port in ports) for g in self.groups)
        return [known.setdefault(spans_to, len(known)) for spans_to in seen]

    @property
    def pairs(self) -> int:
        """How many NICs the set can have."""
        return min(self.nics, sum(self.room.values()))

    @property
    def each(self) -> int:
        """How many NICs a GPU of it gets at most."""
        return max(1, -(-self.nics // self.size))

    def matched(self, counts: Sequence[int]) -> tuple[int, int]:
        """Give the worst locality and the sum of spans of the best pairs of a set, or of the beginning of one."""
        if not self.pairs:
            return 0, 0
        if not self.contended:
            near = sorted(g.nearest for g, n in zip(self.groups, counts, strict=True) for _ in range(n))
            rounds, rest = divmod(self.pairs, len(near))
            return (near[-1] if rounds else near[rest - 1]) // FINE, rounds * sum(near) + sum(near[:rest])
        # GPUs that are as far from every port are equal in a matching.
        key = tuple(sorted(self._views[i] for i, n in enumerate(counts) for _ in range(n)))
        if key not in self._solved:
            self.matchings += 1
            places = [g.place(i) for g, n in zip(self.groups, counts, strict=True) for i in range(n)]
            count = min(self.pairs, self.each * len(places))
            self._solved[key] = _worst_and_sum(spans(self.distances, [(places, count)], self.room))
        return self._solved[key]

    def names(self, counts: Sequence[int]) -> list[str]:
        """Name the units behind the counts, without those that must be included anyway."""
        chosen = [name for g, n in zip(self.groups, counts, strict=True) for name in g.names[: n - g.taken]]
        return sorted(chosen, key=self.distances.gpu_order)


def collect(
    distances: Distances,
    free: Sequence[str],
    must: Sequence[str],
    size: int,
    room: Mapping[str, int],
    load: Mapping[str, int],
    nics: int,
    nics_first: bool = False,
) -> Choices:
    """Group the GPUs and work out what they cost, if the set gets so many NICs. `nics_first`: before NVLinks."""
    single: dict[str, Group] = {}
    for name in sorted({*free, *must}, key=distances.gpu_order):
        place = distances.port(name)
        group = single.setdefault(place, Group([place], []))
        if name in must:
            group.taken += 1
        else:
            group.names.append(name)
    shared = {distances.port(name) for name in free if "::" in name}
    ports = [port for port, units in room.items() if units > 0]
    costs = _Costs(distances, list(single), shared, {p: g.units for p, g in single.items()}, nics_first)
    for place, group in single.items():
        group.nearest = min((distances.span(place, port) for port in ports), default=0)
        loads = (load.get(port, 0) for port in distances.nearest(place, ports))
        group.alone = _USED * load.get(place, 0) + costs.left_behind(place) + _NIC_LOAD * min(loads, default=0)
    each = max(1, -(-nics // size))
    contended = bool(ports) and not _all_nearest(distances, list(single.values()), room, size, each)
    groups = _alike(distances, list(single.values()), costs, ports if contended else ())
    groups.sort(key=lambda g: (not g.taken, g.nearest))
    choices = Choices(distances, groups, size, room, nics, contended=contended)
    for a in groups:
        choices.first.append([costs.first(a.places[0], b.places[-1]) for b in groups])
        choices.last.append([costs.last(a.places[0], b.places[-1]) for b in groups])
    if ports:
        _bound(choices)
    if contended and choices.each > 1:
        choices.claiming = _claim(choices)
    return choices


class _Costs:
    """What two units cost, by the GPUs that they are of."""

    def __init__(
        self,
        distances: Distances,
        places: Sequence[str],
        shared: set[str],
        units: Mapping[str, int],
        nics_first: bool,
    ) -> None:
        self._distances = distances
        self._shared = shared
        self._units = units
        self._nics_first = nics_first
        self._most = max((distances.links(a, b) for a, b in combinations(distances.gpus, 2)), default=0)

    def first(self, a: str, b: str) -> int:
        if a == b:
            return _SHARED if a in self._shared else 0
        return 0 if self._nics_first else self._missing(a, b)

    def last(self, a: str, b: str) -> int:
        links = _LINKS * self._missing(a, b) if self._nics_first and a != b else 0
        return links + _SPAN * self._distances.span(a, b)

    def _missing(self, a: str, b: str) -> int:
        return self._most - self._distances.links(a, b)

    def left_behind(self, place: str) -> int:
        """Weigh the free units near a GPU. What stays free is hurt least where there are few of them."""
        near = links = 0
        for other, units in self._units.items():
            if other == place:
                near += 0 if place in self._shared else Locality.SYS * (units - 1)
            else:
                near += (Locality.SYS - self._distances.between(place, other)) * units
                links += self._distances.links(place, other) * units
        return _LINKS_LEFT * links + _NEAR_LEFT * near


def _all_nearest(distances: Distances, groups: Sequence[Group], room: Mapping[str, int], size: int, each: int) -> bool:
    """Tell whether all GPUs could have so many NICs each at their nearest distance, all at once."""
    ports = [port for port, units in room.items() if units > 0]
    rows = [g for g in groups for _ in range(min(g.units, size) * each)]
    if len(rows) > sum(room[port] for port in ports):
        return False
    costs = [[0 if distances.span(g.places[0], port) == g.nearest else None for port in ports] for g in rows]
    return assign(costs, [[0] * min(room[port], len(rows)) for port in ports]) is not None


def _alike(distances: Distances, groups: Sequence[Group], costs: _Costs, ports: Sequence[str]) -> list[Group]:
    """Join single GPUs that are as far from every other one, cost the same alone, and are as far from the ports."""
    places = [g.places[0] for g in groups]
    rows = {a: [(costs.first(a, b), costs.last(a, b)) for b in places] for a in places}
    index = {place: i for i, place in enumerate(places)}
    joined: list[Group] = []
    for group in groups:
        home = next((g for g in joined if _twins(distances, g, group, rows, index, ports)), None)
        if home is None:
            joined.append(group)
        else:
            home.places += group.places
            home.names += group.names
    return joined


def _twins(
    distances: Distances,
    home: Group,
    other: Group,
    rows: Mapping[str, Sequence[tuple[int, int]]],
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
    return all(distances.span(a, port) == distances.span(b, port) for port in ports)


def _bound(choices: Choices) -> None:
    """Find the best pairs of all sets, whatever else such a set costs."""
    groups, size = choices.groups, choices.size
    if not choices.contended:
        near = sorted(g.nearest for g in groups for _ in range(g.units * choices.each))[: choices.pairs]
        choices.bound = near[-1] // FINE, sum(near)
        return
    units = [(i, n) for i, g in enumerate(groups) for n in range(min(g.units, size))]
    rows = [unit for unit in units for _ in range(choices.each)]
    best = spans(choices.distances, [([groups[i].place(n) for i, n in rows], choices.pairs)], choices.room)
    choices.bound = _worst_and_sum(best)
    used = Counter(i for i, _ in {unit for unit, near in zip(rows, best, strict=True) if near is not None})
    choices.bounding = tuple(used[i] for i in range(len(groups)))


def _claim(choices: Choices) -> tuple[int, ...]:
    """Take the unit whose NICs would be nearest, with these NICs, again and again."""
    groups, each, left = choices.groups, choices.each, dict(choices.room)
    counts = [0] * len(groups)

    def nearest(group: int) -> list[tuple[Locality, str]]:
        near = sorted((choices.distances.between(groups[group].place(counts[group]), p), p) for p in left if left[p])
        return [found for found in near for _ in range(left[found[1]])][:each]

    for _ in range(choices.size):
        free = [g for g, group in enumerate(groups) if counts[g] < group.units]
        owed = [g for g in free if counts[g] < groups[g].taken] or free
        claims = {g: nearest(g) for g in owed}
        best = min(owed, key=lambda g: (-len(claims[g]), [near for near, _ in reversed(claims[g])], g))
        for _, port in claims[best]:
            left[port] -= 1
        counts[best] += 1
    return tuple(counts)


def _worst_and_sum(pairs: Sequence[int | None]) -> tuple[int, int]:
    found = [span for span in pairs if span is not None]
    return max(found) // FINE, sum(found)
