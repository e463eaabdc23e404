"""NICs for given GPUs, as an exact minimum.

One result is better than another by, in this order: the locality of its worst pair of GPU and NIC; the
sum of all localities; with fewer NICs than GPUs, how near the NICs are to all of them; the sum of what tells
pairs of one locality apart (`Distances.span`); how few NICs it takes that are the nearest one of a GPU which is
still free; how evenly adapters are loaded, or, where they are to be filled one after the other, how full those are
that it takes; the order of addresses.

Several groups, such as the containers of a pod, are served at once, each in its own ratio: each GPU of a group gets
as many NICs as every other, and some of them one more. A group without GPUs has its NICs from the NUMA nodes that it
wishes for, as far as the other groups' pairs allow.

VFs of one PF are equal, so that GPUs are matched to ports with room for several, not to 256 VFs; and ports that are
equal but for their load are one column of the matching.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from agent.model.device import NO_NUMA_NODE
from agent.model.locality import Locality
from agent.placement.distances import FINE, Distances

NOTHING: Mapping[str, int] = MappingProxyType({})
RAIL = 840
"""A GPU's nearest port, divisible by how many nearest ports there usually are."""

# The terms of a cost, each wide enough never to reach into the next.
_LOAD, _RAIL, _FINER, _ALL, _WISH, _SUM, _FORCED = 1 << 16, 1 << 44, 1 << 72, 1 << 92, 1 << 112, 1 << 124, 1 << 148


@dataclass(frozen=True, slots=True)
class Group:
    """So many NICs that belong together."""

    nodes: tuple[int, ...]
    """The NUMA node that each is wished from."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that they should be near to, in the order in which these are served."""


@dataclass(frozen=True, slots=True)
class Row:
    """One that is to get a NIC."""

    group: int
    place: str | None
    """The GPU; None if it is for none."""
    node: int | None = None
    """The NUMA node that is wished for, where there is no GPU."""
    optional: bool = False
    """The group has more such rows than NICs for them."""


def match_nics(
    distances: Distances,
    gpus: Sequence[str],
    free: Sequence[str],
    count: int,
    load: Mapping[str, int] = NOTHING,
    *,
    spare_gpus: Sequence[str] | None = None,
    spread: bool = True,
) -> tuple[str, ...]:
    """Choose `count` of the free devices for GPUs: first one for each GPU, in the order of the GPUs; then further ones.

    `free` are PCI addresses of VFs or HCAs; one that is listed twice can be taken twice (shares).
    `load` counts what is in use of a port (a PF, or a device without one), `spare_gpus` are those that other
    pods may still get (default: all others of the node). Gives fewer if fewer are free. With fewer NICs than GPUs
    they go where they are nearest. Without `spread` one port is filled before another.
    """
    units = _by_port(distances, free)
    room = {port: len(devices) for port, devices in units.items()}
    ports = match_ports(distances, gpus, room, count, load, spare_gpus=spare_gpus, spread=spread)
    return tuple(units[port].pop() for port in ports)


def _by_port(distances: Distances, free: Iterable[str]) -> dict[str, list[str]]:
    """Group devices by their port, the first one last."""
    units: dict[str, list[str]] = {}
    for device in sorted(free, key=distances.order, reverse=True):
        units.setdefault(distances.port(device), []).append(device)
    return units


def match_groups(
    distances: Distances,
    groups: Sequence[Group],
    free: Mapping[str, int],
    load: Mapping[str, int],
    *,
    spread: bool = True,
) -> tuple[tuple[str, ...], ...] | None:
    """Choose NICs for each group, in the order of its GPUs, first one for each; None if they are too few.

    `free` maps PCI addresses to NUMA nodes; `load` counts what is in use of a port (a PF, or an adapter of its own).
    Without `spread` one port is filled before another.
    """
    if sum(len(group.nodes) for group in groups) > len(free):
        return None
    units = _by_port(distances, free)
    nodes = {port: free[devices[-1]] for port, devices in units.items()}
    room = {port: len(devices) for port, devices in units.items()}
    ports = _match(distances, groups, room, load, nodes=nodes, spread=spread)
    return tuple(tuple(units[port].pop() for port in mine) for mine in ports)


def for_pairs(distances: Distances, free: Iterable[str], count: int) -> frozenset[str]:
    """Leave of each port half of `count` free devices: whichever are chosen, pairs can be made of them over two ports.

    Of an odd number none can be made, and nothing is left out: who joins them says so.
    """
    kept, there = set[str](), Counter[str]()
    for device in sorted(free, key=distances.order):
        port = distances.port(device)
        if count % 2 or there[port] < count // 2:
            there[port] += 1
            kept.add(device)
    return frozenset(kept)


def match_ports(
    distances: Distances,
    gpus: Sequence[str],
    room: Mapping[str, int],
    count: int,
    load: Mapping[str, int] = NOTHING,
    *,
    spare_gpus: Sequence[str] | None = None,
    forced: Mapping[str, int] = NOTHING,
    spread: bool = True,
) -> tuple[str, ...]:
    """Choose a port for each of `count` NICs, as `match_nics` does. `room` counts what is free at each port."""
    count = min(max(count, 0), sum(room.values()))
    group = Group((NO_NUMA_NODE,) * count, tuple(gpus))
    (ports,) = _match(distances, [group], room, load, spare_gpus=spare_gpus, forced=forced, spread=spread)
    return ports


def spans(
    distances: Distances, groups: Sequence[tuple[Sequence[str], int]], room: Mapping[str, int]
) -> tuple[int | None, ...]:
    """Tell the spans of some groups' GPUs and their NICs in the best matching, by the worst locality, then by the sum.

    A group is its GPUs and how many NICs they share out evenly. The answer is in the order of `_rows`: for each of a
    group's whole rounds all GPUs, then, None where there is no NIC for it, each GPU for the rest. There must be room.
    """
    ports = sorted(port for port, units in room.items() if units > 0)
    rows, idle = _rows([Group((NO_NUMA_NODE,) * count, tuple(map(distances.port, gpus))) for gpus, count in groups])
    localities = _localities(distances, rows, ports)
    far = [[distances.span(row.place, port) if row.place else 0 for port in ports] for row in rows]
    units = [[0] * min(room[port], len(rows)) for port in ports]
    found = _solve(rows, idle, localities, far, units)
    return tuple(None if c is None else far[r][c] for r, c in enumerate(found))


def _match(
    distances: Distances,
    groups: Sequence[Group],
    room: Mapping[str, int],
    load: Mapping[str, int],
    *,
    nodes: Mapping[str, int] = NOTHING,
    spare_gpus: Sequence[str] | None = None,
    forced: Mapping[str, int] = NOTHING,
    spread: bool = True,
) -> tuple[tuple[str, ...], ...]:
    """Choose a port for each NIC of each group. `nodes` are the ports' NUMA nodes, where any is wished for."""
    ports = sorted((port for port, units in room.items() if units > 0), key=distances.order)
    groups = [replace(group, gpus=tuple(map(distances.port, group.gpus))) for group in groups]
    rows, idle = _rows(groups)
    rails = _rails(distances, _spare(distances, [gpu for group in groups for gpu in group.gpus], spare_gpus), ports)
    few = [group.gpus if len(group.nodes) < len(group.gpus) else () for group in groups]
    extra = [
        [_RAIL * rails[port] + _ALL * sum(distances.between(gpu, port) for gpu in gpus) for port in ports]
        for gpus in few
    ]
    localities = _localities(distances, rows, ports)
    costs = [
        [
            extra[row.group][c]
            + (
                _SUM * near + _FINER * (distances.span(row.place, port) % FINE)
                if row.place
                else _WISH * (port in nodes and nodes[port] != row.node)
            )
            for c, (port, near) in enumerate(zip(ports, line, strict=True))
        ]
        for row, line in zip(rows, localities, strict=True)
    ]
    prices = [_prices(min(room[p], len(rows)), load.get(p, 0), forced.get(p, 0), spread=spread) for p in ports]
    found = _solve(rows, idle, localities, costs, prices, [forced.get(p, 0) for p in ports])
    chosen: list[list[str]] = [[] for _ in groups]
    for row, port in zip(rows, found, strict=True):
        if port is not None:
            chosen[row.group].append(ports[port])
    return tuple(map(tuple, chosen))


def _rows(groups: Sequence[Group]) -> tuple[list[Row], list[int]]:
    """List who gets a NIC, and for each group how many of its optional rows get none."""
    rows: list[Row] = []
    idle = []
    for number, group in enumerate(groups):
        count, gpus = len(group.nodes), group.gpus
        # Every GPU gets as many as every other, and some of them one more.
        rounds, rest = divmod(count, len(gpus)) if gpus else (0, 0)
        rows += (
            [Row(number, gpu) for gpu in gpus * rounds] if gpus else [Row(number, None, node) for node in group.nodes]
        )
        rows += [Row(number, gpu, optional=True) for gpu in gpus] if rest else []
        idle.append(len(gpus) - rest if rest else 0)
    return rows, idle


def _localities(distances: Distances, rows: Sequence[Row], ports: Sequence[str]) -> list[list[Locality]]:
    return [[distances.between(row.place, port) if row.place else Locality.SELF for port in ports] for row in rows]


def _solve(
    rows: Sequence[Row],
    idle: Sequence[int],
    localities: Sequence[Sequence[Locality]],
    costs: Sequence[Sequence[int]],
    prices: Sequence[Sequence[int]],
    forced: Sequence[int] = (),
) -> tuple[int | None, ...]:
    """Give each row a port (by number), None to those that go without: the worst locality counts, then the cost."""
    if not rows:
        return ()
    # Ports that cost every row the same are one column. Of its units the cheapest goes first, then the first port's.
    ports = range(len(prices))
    alike: dict[tuple[int, ...], list[int]] = {}
    for c in ports:
        alike.setdefault(tuple(line[c] for line in costs), []).append(c)
    columns = list(alike.values())
    units = [sorted((price + c, c) for c in column for price in prices[c])[: len(rows)] for column in columns]
    waiting = [(g, [0] * count) for g, count in enumerate(idle) if count]
    priced = [[price for price, _ in column] for column in units] + [column for _, column in waiting]
    for worst in _thresholds(rows, localities):
        allowed = [
            [line[c[0]] if near[c[0]] <= worst else None for c in columns]
            + [0 if row.optional and row.group == g else None for g, _ in waiting]
            for row, line, near in zip(rows, costs, localities, strict=True)
        ]
        found = assign(allowed, priced)
        if found is None:
            continue
        left = [iter(column) for column in units]
        taken = tuple(next(left[c])[1] if c < len(columns) else None for c in found)
        if _takes(taken, forced):
            return taken
    raise AssertionError("every port is within the last threshold")


def _spare(distances: Distances, partners: Sequence[str], spare_gpus: Sequence[str] | None) -> list[str]:
    known = distances.gpus if spare_gpus is None else spare_gpus
    return [gpu for gpu in dict.fromkeys(map(distances.port, known)) if gpu not in partners]


def _rails(distances: Distances, spare: Sequence[str], ports: Sequence[str]) -> dict[str, int]:
    """Weigh each port by the free GPUs that it is the nearest one of. One of several counts in part."""
    weights = dict.fromkeys(ports, 0)
    for gpu in spare:
        nearest = distances.nearest(gpu, ports)
        for port in nearest:
            weights[port] += RAIL // len(nearest)
    return weights


def _prices(units: int, load: int, forced: int, *, spread: bool) -> list[int]:
    """What each more NIC of a port costs: never less than the one before, as `assign` needs it."""
    return [_LOAD * (load + i if spread else -load) - (_FORCED if i < forced else 0) for i in range(units)]


def _thresholds(rows: Sequence[Row], localities: Sequence[Sequence[Locality]]) -> list[Locality]:
    """List the worst localities that can be, beginning with one below which some row has no port at all."""
    least = max(
        (min(line) for row, line in zip(rows, localities, strict=True) if not row.optional), default=Locality.SELF
    )
    return sorted({d for line in localities for d in line if d >= least})


def _takes(found: Sequence[int | None], forced: Sequence[int]) -> bool:
    count = sum(port is not None for port in found)
    return sum(min(found.count(c), n) for c, n in enumerate(forced) if n) >= min(sum(forced), count)


Costs = Sequence[Sequence[int | None]]
"""By row and column; None: not allowed."""


# An exact matching of rows to columns with room for several, by the shortest augmenting path: minimum-cost flow in
# the form of Jonker and Volgenant (1987), with a column's price rising unit by unit. Each row is added by the cheapest
# chain of moves, and the result after each is a minimum for the rows so far (Ahuja, Magnanti, Orlin: Network Flows,
# section 9.7; convex costs: section 14.4).


def assign(costs: Costs, prices: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Assign each row to a column at the least total cost; None if not all of them find one.

    `prices[c]` are what the first, second … row on column c costs on top, not falling; as many rows as
    there are prices fit. Of equal results the one with lower columns for lower rows is likely, and
    the same always comes from the same arguments.
    """
    place: list[int] = []
    rows_on: list[list[int]] = [[] for _ in prices]
    for row in range(len(costs)):
        path = _shortest(row, costs, prices, rows_on)
        if path is None:
            return None
        place.append(-1)
        for moved, column in path:
            if place[moved] >= 0:
                rows_on[place[moved]].remove(moved)
            place[moved] = column
        for moved, column in path:
            rows_on[column].append(moved)
    return tuple(place)


def _shortest(
    row: int, costs: Costs, prices: Sequence[Sequence[int]], rows_on: Sequence[Sequence[int]]
) -> list[tuple[int, int]] | None:
    """Find the cheapest chain: the row goes to a column, whose row goes to another …, the last one has room."""
    reach: list[int | None] = list(costs[row])
    mover = [row] * len(prices)
    """Which row enters the column on the cheapest way to it."""
    pending = [c for c, cost in enumerate(reach) if cost is not None]
    best: int | None = None
    end = -1
    # Bellman and Ford, since a move can be a gain. A chain never enters a column twice: there are no negative
    # cycles while the rows so far stand at a minimum.
    while pending:
        following: list[int] = []
        for column in pending:
            here = reach[column]
            assert here is not None
            full = len(rows_on[column]) == len(prices[column])
            if not full:
                total = here + prices[column][len(rows_on[column])]
                if best is None or total < best or (total == best and column < end):
                    best, end = total, column
            for other in rows_on[column]:
                leaving = costs[other]
                gone = leaving[column]
                assert gone is not None
                for target, cost in enumerate(leaving):
                    if cost is None or target == column:
                        continue
                    there = here - gone + cost
                    known = reach[target]
                    if known is None or there < known:
                        reach[target], mover[target] = there, other
                        if target not in following:
                            following.append(target)
        pending = following
    if best is None:
        return None
    path = []
    column = end
    while (moved := mover[column]) != row:
        path.append((moved, column))
        column = next(c for c, rows in enumerate(rows_on) if moved in rows)
    path.append((row, column))
    return path
