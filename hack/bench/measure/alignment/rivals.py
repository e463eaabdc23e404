"""Other ways of choosing, played without an agent: what kubelet and common plugins do, as pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations

from agent.model.device import NO_NUMA_NODE
from agent.placement import Distances, choose_gpus
from measure.alignment.score import Chance

Choice = tuple[list[str], list[str]]
"""GPUs and NICs."""
Rival = Callable[[Distances, Chance, int, random.Random], Choice]


def kubelet_default(_distances: Distances, free: Chance, size: int, chance: random.Random) -> Choice:
    """Choose as kubelet does without preference and topology manager: it takes what its maps give first.

    devicesToAllocate and UnsortedList, pkg/kubelet/cm/devicemanager/manager.go.
    """
    return chance.sample(free.gpus, size), chance.sample(free.nics, size)


def numa_only(distances: Distances, free: Chance, size: int, chance: random.Random) -> Choice:
    """Choose as with the topology manager's best-effort: the fewest NUMA nodes that hold both, then any of theirs.

    Where firmware names no NUMA node the devices have no topology, and kubelet no preference.
    """
    nodes = sorted({distances.numa_node(d) for d in (*free.gpus, *free.nics)} - {NO_NUMA_NODE})
    for width in range(1, len(nodes) + 1):
        for mask in combinations(nodes, width):
            gpus = [d for d in free.gpus if distances.numa_node(d) in mask]
            nics = [d for d in free.nics if distances.numa_node(d) in mask]
            if len(gpus) >= size and len(nics) >= size:
                return chance.sample(gpus, size), chance.sample(nics, size)
    return kubelet_default(distances, free, size, chance)


def greedy(distances: Distances, free: Chance, size: int, _chance: random.Random) -> Choice:
    """Choose GPUs that belong together without a look at NICs, then for one after the other the nearest free NIC."""
    gpus = choose_gpus(distances, free.gpus, (), size)
    nics = list(free.nics)
    taken: list[str] = []
    for gpu in gpus:
        taken.append(min(nics, key=lambda nic: (distances.distance(gpu, nic), distances.order(nic))))
        nics.remove(taken[-1])
    return list(gpus), taken


RIVALS: tuple[tuple[str, Rival], ...] = (
    ("kubelet_default", kubelet_default),
    ("numa_only", numa_only),
    ("greedy", greedy),
)


class Books:
    """Who has what, for a rival."""

    def __init__(self, gpus: Sequence[str], nics: Sequence[str]) -> None:
        self._gpus, self._nics = list(gpus), list(nics)
        self._held: dict[str, Choice] = {}

    @property
    def free(self) -> Chance:
        return Chance(tuple(self._gpus), tuple(self._nics))

    def take(self, pod: str, choice: Choice) -> None:
        for mine, theirs in zip((self._gpus, self._nics), choice, strict=True):
            for device in theirs:
                mine.remove(device)
        self._held[pod] = choice

    def give_back(self, pod: str) -> None:
        gpus, nics = self._held.pop(pod)
        self._gpus += gpus
        self._nics += nics
