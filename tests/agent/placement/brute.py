"""The same objectives as placement's, worked out by looking at everything. For small cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, permutations

from agent.model.locality import Locality
from agent.placement import Distances
from agent.placement.distances import FINE


def pair_keys(distances: Distances, gpus: Sequence[str], nics: Sequence[str]) -> tuple[int, int]:
    """Give the best (worst locality, sum of spans) of GPUs and NICs, one to one; some of the more numerous are left."""
    few, many = sorted((list(gpus), list(nics)), key=len)
    return min(pairs_key(distances, zip(few, order, strict=True)) for order in permutations(many, len(few)))


def pairs_key(distances: Distances, pairs: Iterable[tuple[str, str]]) -> tuple[int, int]:
    """Give the worst locality and the sum of the spans of some pairs."""
    found = [span(distances, a, b) for a, b in pairs]
    return max(found, default=0) // FINE, sum(found)


def span(distances: Distances, a: str, b: str) -> int:
    """Tell how far two devices are apart."""
    return distances.span(distances.port(a), distances.port(b))


def nic_key(
    distances: Distances, gpus: Sequence[str], nics: Sequence[str], free: Sequence[str], load: Mapping[str, int]
) -> tuple[int, ...]:
    """Work out what a choice of as many NICs as GPUs, in the GPUs' order, costs."""
    found = [distances.distance(g, n) for g, n in zip(gpus, nics, strict=True)]
    finer = sum(span(distances, g, n) % FINE for g, n in zip(gpus, nics, strict=True))
    ports = {distances.port(n) for n in free}
    broken = 0
    for spare in distances.gpus:
        if spare in gpus:
            continue
        best = min(span(distances, spare, p) for p in ports)
        near = [p for p in ports if span(distances, spare, p) == best]
        broken += sum(840 // len(near) for n in nics if distances.port(n) in near)
    taken = Counter(distances.port(n) for n in nics)
    loaded = sum(load.get(p, 0) + i for p, n in taken.items() for i in range(n))
    return max(found, default=0), sum(found), finer, broken, loaded


def best_nics(
    distances: Distances, gpus: Sequence[str], free: Sequence[str], load: Mapping[str, int]
) -> tuple[int, ...]:
    """Give the least cost of any choice."""
    return min(nic_key(distances, gpus, order, free, load) for order in permutations(free, len(gpus)))


def gpu_key(distances: Distances, chosen: Sequence[str], free: Sequence[str], nics: Sequence[str]) -> tuple[int, ...]:
    """Work out what a set of whole GPUs costs, but for the last term (the load of their NICs)."""
    most = max((distances.links(a, b) for a, b in combinations(distances.gpus, 2)), default=0)
    missing = sum(most - distances.links(a, b) for a, b in combinations(chosen, 2))
    worst, total = pair_keys(distances, chosen, nics) if nics else (0, 0)
    apart = sum(span(distances, a, b) for a, b in combinations(chosen, 2))
    left = [(a, b) for a in chosen for b in free if a != b]
    links = sum(distances.links(a, b) for a, b in left)
    near = sum(Locality.SYS - distances.distance(a, b) for a, b in left)
    return missing, worst, total, apart, links, near


def gpu_sets(free: Sequence[str], must: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    rest = [g for g in free if g not in must]
    for more in combinations(rest, size - len(must)):
        yield (*must, *more)


def shared_out(
    distances: Distances, groups: Sequence[tuple[Sequence[str], int]], nics: Sequence[str]
) -> tuple[int, int]:
    """Give the best (worst locality, sum of spans) where each group's GPUs share its number of the NICs out evenly."""

    def ways(left: Sequence[tuple[Sequence[str], int]], free: tuple[str, ...]) -> Iterator[list[int]]:
        if not left:
            yield []
            return
        (gpus, count), *others = left
        rounds, rest = divmod(count, len(gpus))
        for more in combinations(gpus, rest):
            rows = [*gpus] * rounds + list(more)
            for mine in permutations(free, count):
                here = [span(distances, a, b) for a, b in zip(rows, mine, strict=True)]
                for found in ways(others, tuple(nic for nic in free if nic not in mine)):
                    yield here + found

    return min((max(found, default=0) // FINE, sum(found)) for found in ways(groups, tuple(nics)))
