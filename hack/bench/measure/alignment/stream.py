"""Pods that come and go, the same ones for every way of choosing. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

SIZES = (1, 2, 4, 8)
ARRIVALS = 0.6
"""Share of steps in which a pod comes, as long as there is room: the node is mostly full, never idle."""
PAUSE_SECONDS = 60.0
AT_ONCE_SECONDS = 0.02
"""Between two pods of which the second comes right after the first."""
LIFE_SECONDS = 1.0
"""So long lives any pod."""

Shape = tuple[int, int]
"""How many GPUs and NICs a container asks for."""
Pod = tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A pod that comes, or goes (without containers)."""

    pod: str
    containers: Pod = ()
    after: float = PAUSE_SECONDS
    """Seconds since the step before."""

    @property
    def comes(self) -> bool:
        return bool(self.containers)

    @property
    def gpus(self) -> int:
        return sum(gpus for gpus, _ in self.containers)

    @property
    def nics(self) -> int:
        return sum(nics for _, nics in self.containers)


@dataclass(frozen=True, slots=True)
class Play:
    """Which pods come and go."""

    name: str
    pods: tuple[Pod, ...]
    """Drawn from; what stands there twice comes twice as often."""
    at_once: float = 0.0
    """Share of steps that come within half a second of the one before, before anybody hears of that."""
    other_plugin: bool = False
    """The GPUs are another plugin's, and any that are free."""


def _ratio(gpus: int, nics: int, sizes: tuple[int, ...] = SIZES) -> tuple[Pod, ...]:
    return tuple(((size * gpus, size * nics),) for size in sizes)


EVEN = Play("1:1", _ratio(1, 1))
BURSTS = Play("1:1, bursts", _ratio(1, 1, tuple(range(1, 9))), at_once=0.7)
PLAYS = (
    EVEN,
    BURSTS,
    Play("1:2", _ratio(1, 2)),
    Play("1:4", _ratio(1, 4)),
    Play("2:1", _ratio(2, 1, (1, 2, 4))),
    Play("one kind only", (*_ratio(1, 1) * 3, *_ratio(1, 0), *_ratio(0, 1)), at_once=0.5),
    Play(
        "containers",
        (
            ((2, 2), (1, 1)),
            ((1, 1), (1, 1)),
            ((4, 4), (2, 2)),
            ((1, 2), (2, 1)),
            ((1, 2), (1, 1)),
        ),
    ),
    Play("other plugin's GPUs", _ratio(1, 1), other_plugin=True),
)


def steps(play: Play, gpus: int, nics: int, pods: int, seed: int) -> Iterator[Step]:
    """Draw steps until so many pods have come. A pod comes only if there are GPUs and NICs enough for it."""
    chance = random.Random(seed)
    running: dict[str, Step] = {}
    came: dict[str, float] = {}
    come, now = 0, 0.0
    while come < pods:
        left = (gpus - sum(s.gpus for s in running.values()), nics - sum(s.nics for s in running.values()))
        fitting = [pod for pod in play.pods if sum(g for g, _ in pod) <= left[0] and sum(n for _, n in pod) <= left[1]]
        after = PAUSE_SECONDS
        if chance.random() < play.at_once:
            after = chance.choice((AT_ONCE_SECONDS, AT_ONCE_SECONDS, 0.5))
        if fitting and (not running or chance.random() < ARRIVALS):
            come += 1
            pod = f"pod-{come}"
            now += after
            running[pod], came[pod] = Step(pod, chance.choice(fitting), after), now
            yield running[pod]
        elif running:
            pod = chance.choice(sorted(running))
            if now + after < came[pod] + LIFE_SECONDS:
                after = PAUSE_SECONDS
            now += after
            del running[pod]
            yield Step(pod, after=after)
        else:
            return
