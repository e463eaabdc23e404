"""GPUs that belong together and find NICs near them.

One set is better than another by, in this order: replicas of one GPU taken together (they would share it);
NVLinks between the GPUs; the worst locality, then the sum of spans, of the best matching of the GPUs to the
free NICs; how much replicas' GPUs are in use; how far the GPUs are from each other; how few free GPUs near
them (by NVLink, then by locality) stay behind, so that switches and NUMA nodes are kept whole; how loaded
the nearest NICs are; the driver's order.

GPUs that are alike in all distances are counted, not told apart, and a branch of the search that cannot
beat what was found is left out. On usual hosts that leaves dozens of sets. SEARCH bounds it on strange ones:
the best set so far is the answer then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

from agent.model.locality import Locality
from agent.placement.distances import FINE, Distances
from agent.placement.nics import NOTHING, assign, match_nics, spans

# The terms of a cost, each wide enough never to reach into the next.
_FIRST = 1 << 256
"""A cost is `first * _FIRST + last`: what is settled before any NIC, and what is settled after the NICs."""
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
    """What a unit costs by itself."""

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
    costs: list[list[int]] = field(default_factory=list)
    contended: bool = False
    """GPUs are in each other's way at their nearest ports: only a matching tells what a set's pairs are."""
    bound: tuple[int, int] = (0, 0)
    """The locality of the worst pair and the sum of the pairs' spans that no set is better than."""
    bounding: tuple[int, ...] = ()
    """Units of each group that have such pairs, whatever else they cost; empty if nothing is contended."""
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
    choices.costs = [[costs.of(a.places[0], b.places[-1]) for b in groups] for a in groups]
    if ports:
        _bound(choices)
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

    def of(self, a: str, b: str) -> int:
        span = _SPAN * self._distances.span(a, b)
        if a == b:
            return span + (_FIRST * _SHARED if a in self._shared else 0)
        return span + (_LINKS if self._nics_first else _FIRST) * self._missing(a, b)

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
    rows = {a: [costs.of(a, b) for b in places] for a in places}
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
    rows: Mapping[str, Sequence[int]],
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


def _worst_and_sum(pairs: Sequence[int | None]) -> tuple[int, int]:
    found = [span for span in pairs if span is not None]
    return max(found) // FINE, sum(found)


Key = tuple[int, int, int, int]
"""What a set costs: shared GPUs and missing NVLinks, the worst pair's locality, the sum of spans, all the rest."""
SEEDS = 4
MATCHING_STEPS = 20
"""How many steps of the search take as long as one matching."""


def search(choices: Choices, steps: int) -> tuple[int, ...]:
    """Find how many units of each group make the best set. After `steps`, the best one so far."""
    return _Search(choices, steps).run()


class _Sum:
    """A set under construction, with what one more unit of each group would add to its cost."""

    def __init__(self, choices: Choices) -> None:
        self._c = choices
        self.counts = [0] * len(choices.groups)
        self.left = choices.size
        self.cost = 0
        self.more = [group.alone for group in choices.groups]

    def change(self, group: int, by: int) -> None:
        """Take units of a group, or give them back."""
        # n units more cost n times what one costs, and what they cost each other; giving back is its reverse.
        if by < 0:
            self._spread(group, by)
        pairs = abs(by) * (abs(by) - 1) // 2
        sign = 1 if by > 0 else -1
        self.cost += by * self.more[group] + sign * pairs * self._c.costs[group][group]
        if by > 0:
            self._spread(group, by)
        self.counts[group] += by
        self.left -= by

    def _spread(self, group: int, by: int) -> None:
        for g, cost in enumerate(self._c.costs[group]):
            self.more[g] += by * cost


class _Least:
    """The least that units still to be taken can add to a cost."""

    def __init__(self, pairs: Sequence[Sequence[int]], units: Sequence[int]) -> None:
        self._pairs = pairs
        self._units = units
        self._among: dict[tuple[int, int], list[int]] = {}

    def added(self, more: Sequence[int], begin: int, left: int) -> int:
        """Give a lower bound for `left` units of the groups from `begin` on. `more` is what one adds to those taken.

        Each unit counts half of what it costs with each of its `left - 1` cheapest companions.
        """
        among = self._among.get((begin, left))
        if among is None:
            among = self._among[begin, left] = [self._cheapest(g, begin, left - 1) for g in range(begin, len(more))]
        doubled = [
            2 * more[g] + pairs for g, pairs in enumerate(among, begin) for _ in range(min(self._units[g], left))
        ]
        return -(-sum(sorted(doubled)[:left]) // 2)

    def _cheapest(self, group: int, begin: int, count: int) -> int:
        costs = self._pairs[group]
        found = [costs[g] for g in range(begin, len(costs)) for _ in range(min(self._units[g] - (g == group), count))]
        return sum(sorted(found)[:count])


class _Search:
    def __init__(self, choices: Choices, steps: int) -> None:
        self._c = choices
        self._steps = steps
        self._groups = choices.groups
        self._most = [g.units for g in choices.groups]
        self._units_from = [sum(self._most[i:]) for i in range(len(self._most) + 1)]
        self._least = _Least(choices.costs, self._most)
        self._near_from = [min(g.nearest for g in choices.groups[i:]) for i in range(len(self._most))]
        self._each = choices.each
        self._all_paired = choices.pairs == choices.size * choices.each
        self._best: tuple[int, ...] = ()
        self._key: Key | None = None

    def run(self) -> tuple[int, ...]:
        for total in self._grown():
            self._offer(total)
        self._descend(_Sum(self._c), 0, 0, 0)
        return self._best

    def _grown(self) -> Iterator[_Sum]:
        """Grow sets from good beginnings, always by the unit that then costs least."""
        groups, near = self._groups, self._c.pairs > 0
        seeds = sorted(range(len(groups)), key=lambda g: (near and groups[g].nearest, groups[g].alone, g))
        beginnings = [tuple(int(g == seed) for g in range(len(groups))) for seed in seeds[:SEEDS]]
        if self._c.bounding:
            beginnings.append(self._c.bounding)
        for beginning in beginnings:
            total = _Sum(self._c)
            for g, group in enumerate(groups):
                if group.taken:
                    total.change(g, group.taken)
            for g, count in enumerate(beginning):
                if (more := min(count - total.counts[g], total.left)) > 0:
                    total.change(g, more)
            while total.left:
                total.change(
                    min(
                        (g for g, n in enumerate(total.counts) if n < self._most[g]),
                        key=lambda g: (total.more[g] // _FIRST, near and groups[g].nearest, total.more[g]),
                    ),
                    1,
                )
            yield total

    def _offer(self, total: _Sum) -> None:
        first, last = divmod(total.cost, _FIRST)
        key = (first, *self._c.matched(total.counts), last)
        if self._key is None or key < self._key:
            self._best, self._key = tuple(total.counts), key

    def _descend(self, total: _Sum, group: int, worst: int, near: int) -> None:
        """Try all numbers of this group's units, and of the later ones'."""
        if not total.left:
            if all(n >= g.taken for n, g in zip(total.counts, self._groups, strict=True)):
                self._offer(total)
            return
        if (
            self._steps <= MATCHING_STEPS * self._c.matchings
            or self._units_from[group] < total.left
            or not self._promises(total, group, worst, near)
        ):
            return
        self._steps -= 1
        here = self._groups[group]
        for count in range(min(self._most[group], total.left), here.taken - 1, -1):
            if count:
                total.change(group, count)
            nearest = here.nearest // FINE
            self._descend(
                total, group + 1, max(worst, nearest) if count else worst, near + count * self._each * here.nearest
            )
            if count:
                total.change(group, -count)

    def _promises(self, total: _Sum, group: int, worst: int, near: int) -> bool:
        """Tell whether a set that begins so can be better than the best one so far."""
        assert self._key is not None  # that of a grown set, at least
        left = total.left
        first, last = divmod(total.cost + self._least.added(total.more, group, left), _FIRST)
        least_worst, least_sum = self._c.bound
        if self._all_paired:
            least_worst = max(least_worst, worst, self._near_from[group] // FINE)
            least_sum = max(least_sum, near + left * self._each * self._near_from[group])
        return (first, least_worst, least_sum, last) < self._key


SEARCH = 1600
"""Steps of the search, some tens of microseconds each."""


def choose_gpus(
    distances: Distances,
    free_gpus: Sequence[str],
    must_include: Sequence[str],
    size: int,
    free_nics: Sequence[str] = (),
    load: Mapping[str, int] = NOTHING,
    nics: int | None = None,
    *,
    nics_first: bool = False,
) -> tuple[str, ...]:
    """Choose `size` of the free GPUs, those that must be included among them and first.

    GPUs are UUIDs, MIG UUIDs or replicas (`UUID::2`). `free_nics` are PCI addresses as for `match_nics`; without
    any, NICs do not count. `load` counts what is in use of a port or a GPU, `nics` the NICs that the GPUs get in all
    (default: one each). Gives fewer if fewer are free. `nics_first`: the pairs count before NVLinks.
    """
    must = tuple(dict.fromkeys(must_include))[: max(size, 0)]
    room: dict[str, int] = {}
    for nic in free_nics:
        port = distances.port(nic)
        room[port] = room.get(port, 0) + 1
    rest = [gpu for gpu in dict.fromkeys(free_gpus) if gpu not in must]
    size = min(size, len(must) + len(rest))
    if size <= len(must):
        return must[: max(size, 0)]
    choices: Choices = collect(distances, rest, must, size, room, load, size if nics is None else nics, nics_first)
    counts = search(choices, SEARCH)
    return (*must, *choices.names(counts))


def choose_pairs(
    distances: Distances,
    free_gpus: Sequence[str],
    free_nics: Sequence[str],
    size: int,
) -> tuple[tuple[str, str], ...]:
    """Choose `size` GPUs and a NIC for each. Gives fewer pairs if one kind has fewer.

    No choice of other GPUs has better pairs; among equal ones NVLinks decide. Arguments as for `choose_gpus`.
    """
    size = min(size, len(free_nics))
    gpus = choose_gpus(distances, free_gpus, (), size, free_nics, nics_first=True)
    spare = [gpu for gpu in free_gpus if gpu not in gpus]
    return tuple(zip(gpus, match_nics(distances, gpus, free_nics, len(gpus), spare_gpus=spare), strict=True))
