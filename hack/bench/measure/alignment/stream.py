"""Pods that come and go, the same ones for every way of choosing. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

SIZES = (1, 2, 4, 8)
ARRIVALS = 0.6
"""Share of steps in which a pod comes, as long as there is room: the node is mostly full, never idle."""


@dataclass(frozen=True, slots=True)
class Step:
    """A pod that comes with so many GPUs and as many NICs, or goes (0)."""

    pod: str
    size: int


def steps(gpus: int, nics: int, pods: int, seed: int) -> Iterator[Step]:
    """Draw steps until so many pods have come. A pod comes only if there are GPUs and NICs enough for it."""
    chance = random.Random(seed)
    running: dict[str, int] = {}
    come = 0
    while come < pods:
        room = min(gpus, nics) - sum(running.values())
        sizes = [size for size in SIZES if size <= room]
        if sizes and (not running or chance.random() < ARRIVALS):
            come += 1
            pod = f"pod-{come}"
            running[pod] = chance.choice(sizes)
            yield Step(pod, running[pod])
        elif running:
            pod = chance.choice(sorted(running))
            del running[pod]
            yield Step(pod, 0)
        else:
            return
