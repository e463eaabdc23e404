"""NICs for given GPUs, as an exact minimum.

One result is better than another by, in this order: the locality of its worst pair of GPU and NIC; the
sum of all localities; with fewer NICs than GPUs, how near the NICs are to all of them; how near the pairs'
NUMA nodes are; how few NICs it takes that are the nearest one of a GPU which is still free; how evenly
adapters are loaded; the order of addresses.

VFs of one PF are equal, so that GPUs are matched to ports with room for several, not to 256 VFs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from agent.model.topology import Locality
from agent.placement.assignment import assign
from agent.placement.terrain import Terrain

NOTHING: Mapping[str, int] = MappingProxyType({})
RAIL = 840
"""A GPU's nearest port, divisible by how many nearest ports there usually are."""

# The terms of a cost, each wide enough never to reach into the next.
_LOAD, _RAIL, _NUMA, _ALL, _SUM, _FORCED = 1 << 16, 1 << 44, 1 << 72, 1 << 92, 1 << 112, 1 << 136


def match_nics(
    terrain: Terrain,
    gpus: Sequence[str],
    free: Sequence[str],
    count: int,
    load: Mapping[str, int] = NOTHING,
    *,
    spare_gpus: Sequence[str] | None = None,
    must_include: Sequence[str] = (),
) -> tuple[str, ...]:
    """Choose `count` of the free devices for GPUs: first one for each GPU, in the order of the GPUs; then further ones.

    `free` are PCI addresses of VFs or HCAs; one that is listed twice can be taken twice (shares).
    `load` counts what is in use of a port (a PF, or a device without one), `spare_gpus` are those that other
    pods may still get (default: all others of the node). `must_include` are devices, free ones too, that must
    be among the result. Gives fewer if fewer are free. With fewer NICs than GPUs they go where they are nearest.
    """
    units: dict[str, list[str]] = {}
    for device in sorted(free, key=terrain.order, reverse=True):
        units.setdefault(terrain.port(device), []).append(device)
    forced: dict[str, list[str]] = {}
    for device in must_include:
        port = terrain.port(device)
        if device in units.get(port, ()):
            units[port].remove(device)
        forced.setdefault(port, []).append(device)
    room = {port: len(units.get(port, ())) + len(forced.get(port, ())) for port in {**units, **forced}}
    needed = {port: len(devices) for port, devices in forced.items()}
    ports = match_ports(terrain, gpus, room, count, load, spare_gpus=spare_gpus, forced=needed)
    for port, devices in forced.items():
        units.setdefault(port, []).extend(reversed(devices))
    return tuple(units[port].pop() for port in ports)


def match_ports(
    terrain: Terrain,
    gpus: Sequence[str],
    room: Mapping[str, int],
    count: int,
    load: Mapping[str, int] = NOTHING,
    *,
    spare_gpus: Sequence[str] | None = None,
    forced: Mapping[str, int] = NOTHING,
) -> tuple[str, ...]:
    """Choose a port for each of `count` NICs, as `match_nics` does. `room` counts what is free at each port."""
    ports = sorted((port for port, units in room.items() if units > 0), key=terrain.order)
    partners = [terrain.port(gpu) for gpu in gpus]
    count = min(max(count, 0), sum(room[port] for port in ports))
    if not count:
        return ()
    spare = _spare(terrain, partners, spare_gpus)
    rails = _rails(terrain, spare, ports)
    # Every GPU gets as many as every other, and some of them one more.
    rounds, rest = divmod(count, len(partners)) if partners else (0, 0)
    rows: list[str | None] = [*partners] * rounds if partners else [None] * count
    optional = len(partners) if rest else 0
    rows += partners if rest else []
    distances = [[terrain.between(row, port) if row else Locality.SELF for port in ports] for row in rows]
    extra = [_extra(terrain, partners if not rounds else (), port) + _RAIL * rails[port] for port in ports]
    base = [
        [
            _SUM * distance + (_NUMA * terrain.numa_distance(row, port) if row else 0) + extra[c] + c
            for c, (port, distance) in enumerate(zip(ports, distances[r], strict=True))
        ]
        for r, row in enumerate(rows)
    ]
    prices = [_prices(min(room[p], len(rows)), load.get(p, 0), forced.get(p, 0)) for p in ports]
    skip = [[0] * (optional - rest)] if optional else []
    for worst in _thresholds(distances, len(rows) - optional):
        costs = [
            [cost if distances[r][c] <= worst else None for c, cost in enumerate(line)]
            + ([0 if r >= len(rows) - optional else None] if optional else [])
            for r, line in enumerate(base)
        ]
        found = assign(costs, prices + skip)
        if found is not None and _takes(found, [min(forced.get(p, 0), count) for p in ports], count):
            return tuple(ports[c] for c in found if c < len(ports))
    raise AssertionError("every port is within the last threshold")


def pair(terrain: Terrain, gpus: Sequence[str], room: Mapping[str, int], count: int) -> tuple[Locality | None, ...]:
    """Tell how near each GPU's NIC is in the best matching of `count` pairs; None for a GPU that gets none.

    Best by the worst pair, then by the sum. Gives fewer pairs if there are not as many GPUs or NICs.
    """
    ports = sorted(port for port, units in room.items() if units > 0)
    rows = [terrain.port(gpu) for gpu in gpus]
    count = min(count, len(rows), sum(room[port] for port in ports))
    if count <= 0:
        return (None,) * len(rows)
    distances = [[terrain.between(row, port) for port in ports] for row in rows]
    idle = len(rows) - count
    prices = [[0] * min(room[port], count) for port in ports] + ([[0] * idle] if idle else [])
    for worst in _thresholds(distances, 0 if idle else len(rows)):
        costs = [[d if d <= worst else None for d in line] + ([0] if idle else []) for line in distances]
        found = assign(costs, prices)
        if found is not None:
            return tuple(distances[r][c] if c < len(ports) else None for r, c in enumerate(found))
    raise AssertionError("every port is within the last threshold")


def _spare(terrain: Terrain, partners: Sequence[str], spare_gpus: Sequence[str] | None) -> list[str]:
    known = terrain.gpus if spare_gpus is None else spare_gpus
    return [gpu for gpu in dict.fromkeys(map(terrain.port, known)) if gpu not in partners]


def _rails(terrain: Terrain, spare: Sequence[str], ports: Sequence[str]) -> dict[str, int]:
    """Weigh each port by the free GPUs that it is the nearest one of. One of several counts in part."""
    weights = dict.fromkeys(ports, 0)
    for gpu in spare:
        distances = [terrain.between(gpu, port) for port in ports]
        nearest = [port for port, d in zip(ports, distances, strict=True) if d == min(distances)]
        for port in nearest:
            weights[port] += RAIL // len(nearest)
    return weights


def _extra(terrain: Terrain, partners: Sequence[str], port: str) -> int:
    return _ALL * sum(terrain.between(gpu, port) for gpu in partners)


def _prices(units: int, load: int, forced: int) -> list[int]:
    return [_LOAD * (load + i) - (_FORCED if i < forced else 0) for i in range(units)]


def _thresholds(distances: Sequence[Sequence[Locality]], mandatory: int) -> list[Locality]:
    """List the worst localities that can be, beginning with one below which some row has no port at all."""
    least = max((min(line) for line in distances[:mandatory]), default=Locality.SELF)
    return sorted({d for line in distances for d in line if d >= least})


def _takes(found: Sequence[int], forced: Sequence[int], count: int) -> bool:
    needed = min(sum(forced), count)
    return sum(min(found.count(c), n) for c, n in enumerate(forced)) >= needed
