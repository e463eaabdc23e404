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
    """A pod that comes with so many GPUs and NICs, or goes (none)."""

    pod: str
    gpus: int = 0
    nics: int = 0
    at_once: bool = False
    """It comes right after the pod before."""

    @property
    def comes(self) -> bool:
        return bool(self.gpus or self.nics)


def steps(gpus: int, nics: int, pods: int, seed: int, *, alone: float = 0.0, at_once: float = 0.0) -> Iterator[Step]:
    """Draw steps until so many pods have come. A pod comes only if there are GPUs and NICs enough for it.

    `alone` is the share of pods that ask for GPUs or NICs only, `at_once` that of those that come right after another.
    """
    chance = random.Random(seed)
    running: dict[str, Step] = {}
    come = 0
    while come < pods:
        left = (gpus - sum(s.gpus for s in running.values()), nics - sum(s.nics for s in running.values()))
        wants = chance.choice(((1, 0), (0, 1))) if chance.random() < alone else (1, 1)
        room = min(n for n, wanted in zip(left, wants, strict=True) if wanted)
        sizes = [size for size in SIZES if size <= room]
        if sizes and (not running or chance.random() < ARRIVALS):
            come += 1
            size, pod = chance.choice(sizes), f"pod-{come}"
            running[pod] = Step(pod, wants[0] * size, wants[1] * size, chance.random() < at_once)
            yield running[pod]
        elif running:
            pod = chance.choice(sorted(running))
            del running[pod]
            yield Step(pod)
        else:
            return
