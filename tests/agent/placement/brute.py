"""The same objectives as placement's, worked out by looking at everything. For small cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations

from agent.model.topology import Locality
from agent.placement import Terrain


def pair_keys(terrain: Terrain, gpus: Sequence[str], nics: Sequence[str]) -> tuple[int, int]:
    """Give the best (worst, sum) of the localities of GPUs and NICs, one to one; some of the more numerous are left."""
    few, many = sorted((list(gpus), list(nics)), key=len)
    return min(
        (max(found, default=0), sum(found))
        for order in permutations(many, len(few))
        for found in [[terrain.distance(a, b) for a, b in zip(few, order, strict=True)]]
    )


def nic_key(
    terrain: Terrain, gpus: Sequence[str], nics: Sequence[str], free: Sequence[str], load: Mapping[str, int]
) -> tuple[int, ...]:
    """Work out what a choice of as many NICs as GPUs, in the GPUs' order, costs."""
    found = [terrain.distance(g, n) for g, n in zip(gpus, nics, strict=True)]
    numa = sum(terrain.numa_distance(terrain.port(g), terrain.port(n)) for g, n in zip(gpus, nics, strict=True))
    ports = {terrain.port(n) for n in free}
    broken = 0
    for spare in terrain.gpus:
        if spare in gpus:
            continue
        best = min(terrain.distance(spare, p) for p in ports)
        near = [p for p in ports if terrain.distance(spare, p) == best]
        broken += sum(840 // len(near) for n in nics if terrain.port(n) in near)
    taken = Counter(terrain.port(n) for n in nics)
    loaded = sum(load.get(p, 0) + i for p, n in taken.items() for i in range(n))
    return max(found, default=0), sum(found), numa, broken, loaded


def best_nics(terrain: Terrain, gpus: Sequence[str], free: Sequence[str], load: Mapping[str, int]) -> tuple[int, ...]:
    """Give the least cost of any choice."""
    return min(nic_key(terrain, gpus, order, free, load) for order in permutations(free, len(gpus)))


def gpu_key(terrain: Terrain, chosen: Sequence[str], free: Sequence[str], nics: Sequence[str]) -> tuple[int, ...]:
    """Work out what a set of whole GPUs costs, but for the last term (the load of their NICs)."""
    most = max((terrain.links(a, b) for a, b in combinations(terrain.gpus, 2)), default=0)
    missing = sum(most - terrain.links(a, b) for a, b in combinations(chosen, 2))
    worst, total = pair_keys(terrain, chosen, nics) if nics else (0, 0)
    apart = sum(terrain.distance(a, b) for a, b in combinations(chosen, 2))
    left = [(a, b) for a in chosen for b in free if a != b]
    links = sum(terrain.links(a, b) for a, b in left)
    near = sum(Locality.SYS - terrain.distance(a, b) for a, b in left)
    return missing, worst, total, apart, links, near


def gpu_sets(free: Sequence[str], must: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    rest = [g for g in free if g not in must]
    for more in combinations(rest, size - len(must)):
        yield (*must, *more)
