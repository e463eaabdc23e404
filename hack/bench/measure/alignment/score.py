"""What a pod got against the best that it could have got at that moment. Pure.

The best is worked out over all choices of free GPUs and free NICs, but for such as give up NVLinks that the GPUs
could have among themselves: these are worth more than a nearer NIC.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from agent.model.topology import Locality
from agent.placement import Terrain
from agent.placement.nics import pair


@dataclass(frozen=True, slots=True)
class Chance:
    """What was free when a pod came: GPUs by UUID, NICs by PCI address (one that can be shared: as often as that)."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]


@dataclass
class Tally:
    """Pairs so far."""

    pairs: int = 0
    attained: int = 0
    attained_of_any: int = 0
    """Against choices too that give up NVLinks."""
    localities: Counter[Locality] = field(default_factory=Counter)

    def add(self, terrain: Terrain, chance: Chance, gpus: Sequence[str], nics: Sequence[str]) -> None:
        """Count a pod's pairs, matched in its own favour."""
        got = localities(terrain, gpus, nics, len(gpus))
        self.pairs += len(got)
        self.attained += attained(got, best(terrain, chance, len(gpus)))
        self.attained_of_any += attained(got, localities(terrain, chance.gpus, chance.nics, len(gpus)))
        self.localities.update(got)

    @property
    def percent(self) -> float:
        return 100 * self.attained / self.pairs


def best(terrain: Terrain, chance: Chance, size: int) -> tuple[Locality, ...]:
    """Give the best pairs that so many GPUs could have had, among the sets that NVLink joins best."""
    links = {terrain.links(a, b) for a, b in combinations(chance.gpus, 2)}
    if len(links) <= 1:  # all alike: none, or all behind NVSwitches
        return localities(terrain, chance.gpus, chance.nics, size)
    sets = {
        gpus: sum(terrain.links(a, b) for a, b in combinations(gpus, 2)) for gpus in combinations(chance.gpus, size)
    }
    most = max(sets.values())
    return min(
        (localities(terrain, gpus, chance.nics, size) for gpus, joined in sets.items() if joined == most),
        key=lambda found: (max(found), sum(found)),
    )


def localities(terrain: Terrain, gpus: Sequence[str], nics: Sequence[str], size: int) -> tuple[Locality, ...]:
    """Match `size` of the GPUs to as many of the NICs as well as can be: the worst pair counts, then the sum."""
    room = Counter(terrain.port(nic) for nic in nics)
    return tuple(sorted(found for found in pair(terrain, gpus, room, size) if found is not None))


def attained(got: Sequence[Locality], could: Sequence[Locality]) -> int:
    """Count the pairs that are as near as any choice could have made them.

    All of them, if neither the worst pair nor the sum could have been better. Else pairs are compared in the
    order of their nearness, the nearest with the nearest.
    """
    if (max(got), sum(got)) <= (max(could), sum(could)):
        return len(got)
    return sum(here <= there for here, there in zip(got, could, strict=True))
