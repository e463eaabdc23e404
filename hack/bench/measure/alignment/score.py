"""What a pod got against the best that it could have got at that moment. Pure.

A container's pairs are its NICs, each with a GPU: every GPU has as many as every other, and some of them one more. The
best is worked out over all choices of free GPUs and free NICs, but for such as give up NVLinks that a container's GPUs
could have among themselves: these are worth more than a nearer NIC. Where another plugin has chosen the GPUs, it is the
best for these.

That is by the agent's own idea of what is near. Where public documents tell which NIC belongs to which GPU, the same is
counted by these pairs alone (`Documented`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from agent.model.device import Snapshot
from agent.model.locality import Locality
from agent.placement import Distances
from agent.placement.distances import FINE
from agent.placement.nics import spans

Found = tuple[int, ...]
"""Spans of pairs (`Distances.span`): their localities, and what tells pairs of one locality apart."""
Part = tuple[Sequence[str], Sequence[str]]
"""The GPUs and NICs of one container."""


@dataclass(frozen=True, slots=True)
class Chance:
    """What was free when a pod came: GPUs by UUID, NICs by PCI address (one that can be shared: as often as that)."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]


class Documented(Distances):
    """Distances by documents alone: a GPU is near to the NICs that they pair it with, and far from all others."""

    def __init__(self, snapshot: Snapshot, nics: Mapping[str, Sequence[str]]) -> None:
        super().__init__(snapshot)
        self._pairs = frozenset((self.port(gpu), self.port(nic)) for gpu, own in nics.items() for nic in own)

    def between(self, a: str, b: str) -> Locality:
        return Locality.PIX if (a, b) in self._pairs or (b, a) in self._pairs else Locality.SYS

    def span(self, a: str, b: str) -> int:
        return self.between(a, b) * FINE


@dataclass
class Tally:
    """Pairs so far."""

    pairs: int = 0
    attained: int = 0
    attained_of_any: int = 0
    """Against choices too that give up NVLinks."""
    localities: Counter[Locality] = field(default_factory=Counter)

    def add(self, distances: Distances, chance: Chance, parts: Sequence[Part], *, given: bool = False) -> None:
        """Count the pairs of a pod's containers, matched in its own favour. `given`: the GPUs were not ours to choose.

        Containers without GPUs, or without NICs, have no pairs.
        """
        parts = [(gpus, nics) for gpus, nics in parts if gpus and nics]
        if not parts:
            return
        got = tuple(sorted(d for gpus, nics in parts for d in matched(distances, [(gpus, len(nics))], nics)))
        sizes = [(len(gpus), len(nics)) for gpus, nics in parts]
        if given:
            of_any = could = matched(distances, [(gpus, len(nics)) for gpus, nics in parts], chance.nics)
        else:
            of_any = could = bound(distances, chance, sizes)
            if _key(got) > _key(of_any):
                could = best(distances, chance, sizes)
        self.pairs += len(got)
        self.attained += attained(got, could)
        self.attained_of_any += attained(got, of_any)
        self.localities.update(Locality(span // FINE) for span in got)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.pairs + other.pairs,
            self.attained + other.attained,
            self.attained_of_any + other.attained_of_any,
            self.localities + other.localities,
        )

    @property
    def percent(self) -> float | None:
        """Tell how many in a hundred; None if there are no pairs."""
        return 100 * self.attained / self.pairs if self.pairs else None


def matched(distances: Distances, groups: Sequence[tuple[Sequence[str], int]], nics: Sequence[str]) -> Found:
    """Match each group's GPUs to its number of the NICs as well as can be: the worst pair counts, then the sum."""
    room = Counter(distances.port(nic) for nic in nics)
    return tuple(sorted(found for found in spans(distances, groups, room) if found is not None))


def bound(distances: Distances, chance: Chance, sizes: Sequence[tuple[int, int]]) -> Found:
    """Give pairs that no choice of GPUs is better than: each takes as many NICs as any GPU would get, or fewer."""
    each = max(-(-nics // gpus) for gpus, nics in sizes)
    return matched(distances, [(chance.gpus * each, sum(nics for _, nics in sizes))], chance.nics)


def best(distances: Distances, chance: Chance, sizes: Sequence[tuple[int, int]]) -> Found:
    """Give the best pairs that containers could have had, each with one of the sets that NVLink joins best."""
    least = bound(distances, chance, sizes)
    links = {distances.links(a, b) for a, b in combinations(chance.gpus, 2)}
    linked = len(links) > 1  # else they are all alike: none, or all behind switches
    if not linked and len(sizes) == 1 and sizes[0][0] >= sizes[0][1]:
        return least
    ports = sorted({distances.port(nic) for nic in chance.nics})
    kinds = {gpu: tuple(distances.span(gpu, port) for port in ports) for gpu in chance.gpus}
    seen = set[tuple[object, ...]]()
    found: Found | None = None
    for sets in _sets(distances, chance.gpus, [gpus for gpus, _ in sizes], linked=linked):
        kind = tuple(tuple(sorted(kinds[gpu] for gpu in gpus)) for gpus in sets)
        if kind in seen:
            continue
        seen.add(kind)
        groups = [(gpus, nics) for gpus, (_, nics) in zip(sets, sizes, strict=True)]
        here = matched(distances, groups, chance.nics)
        if found is None or _key(here) < _key(found):
            found = here
        if _key(found) == _key(least):
            break
    assert found is not None
    return found


def _sets(
    distances: Distances, free: Sequence[str], sizes: Sequence[int], *, linked: bool
) -> Iterator[tuple[tuple[str, ...], ...]]:
    """List the GPUs that containers can have, one after the other."""
    if not sizes:
        yield ()
        return
    sets = {gpus: _joined(distances, gpus) if linked else 0 for gpus in combinations(free, sizes[0])}
    most = max(sets.values())
    for gpus in (gpus for gpus, joined in sets.items() if joined == most):
        rest = [gpu for gpu in free if gpu not in gpus]
        for others in _sets(distances, rest, sizes[1:], linked=linked):
            yield (gpus, *others)


def _joined(distances: Distances, gpus: Sequence[str]) -> int:
    return sum(distances.links(a, b) for a, b in combinations(gpus, 2))


def attained(got: Sequence[int], could: Sequence[int]) -> int:
    """Count the pairs that are as near as any choice could have made them.

    All of them, if neither the worst pair nor the sum could have been better. Else pairs are compared in the
    order of their nearness, the nearest with the nearest.
    """
    if _key(got) <= _key(could):
        return len(got)
    return sum(here <= there for here, there in zip(got, could, strict=True))


def _key(found: Sequence[int]) -> tuple[int, int]:
    return max(found) // FINE, sum(found)
