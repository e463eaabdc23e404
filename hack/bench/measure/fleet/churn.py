"""Pods that come and go, and agents that step through the time with them."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from measure.fleet.hollow import Cluster, HollowAgent, Units

SHORTEST_POD_SECONDS = 60.0
MEAN_POD_SECONDS = 1800.0
START_SECONDS = 3.0
"""From kubelet's admission, when devices are granted, to the phase Running: images and containers."""
RELEASE_SECONDS = 1.0
"""From the end of a pod to kubelet's giving its devices back."""
DELETE_SECONDS = 30.0
"""From the end of a pod to its deletion by its Job's controller."""
WITH_DEVICE = 0.5
"""Share of the pods that hold a unit."""


@dataclass(order=True, slots=True)
class Happening:
    """One step in a pod's life on one node."""

    at: float
    order: int
    agent: HollowAgent = field(compare=False)
    pod: str = field(compare=False)
    kind: str = field(compare=False)
    unit: tuple[str, str] = field(compare=False, default=("", ""))


class Clock:
    """The time that is passed in."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lives(
    agents: Sequence[HollowAgent], units: Units, begin: float, end: float, pods_per_hour: float, seed: int
) -> list[Happening]:
    """Make up pods that start within the time, on each node so many an hour, and all that happens to them."""
    chance = random.Random(seed)
    order = itertools.count()
    found: list[Happening] = []
    for agent in agents:
        free = [(name, unit.unit_id) for name, offered in units.items() for unit in offered]
        chance.shuffle(free)
        for number, start in enumerate(_moments(chance, begin, end, pods_per_hour)):
            pod = f"{agent.name}-{number}"
            unit = free[number % len(free)] if chance.random() < WITH_DEVICE else ("", "")
            stop = start + SHORTEST_POD_SECONDS + chance.expovariate(1 / (MEAN_POD_SECONDS - SHORTEST_POD_SECONDS))
            for at, kind in (
                (start, "bound"),
                (start + START_SECONDS, "running"),
                (stop, "ended"),
                (stop + RELEASE_SECONDS, "released"),
                (stop + DELETE_SECONDS, "deleted"),
            ):
                found.append(Happening(at, next(order), agent, pod, kind, unit))
    return sorted(found)


async def step_through(
    clock: Clock, cluster: Cluster, agents: Sequence[HollowAgent], happenings: Sequence[Happening], end: float
) -> Counter[int]:
    """Let the time pass until `end`, and return how many writes there were in each second of it."""
    due = [clock.now] * len(agents)
    """When each agent wants to be stepped."""
    heap = [(clock.now, number) for number in range(len(agents))]
    turn = {id(agent): number for number, agent in enumerate(agents)}
    waiting = list(reversed(happenings))
    writes: Counter[int] = Counter()
    while True:
        at, number = heap[0]
        if waiting and waiting[-1].at <= at:
            happening = waiting.pop()
            clock.now = happening.at
            _happen(cluster, happening)
            number = turn[id(happening.agent)]
            due[number] = clock.now  # the agent says itself when it looks at that
            heapq.heappush(heap, (clock.now, number))
            continue
        if at > end:
            return writes
        heapq.heappop(heap)
        if at != due[number]:
            continue  # it was stepped since
        clock.now, agent = at, agents[number]
        before = agent.writes
        due[number] = await agent.publications.step(clock.now)
        heapq.heappush(heap, (due[number], number))
        writes[int(clock.now)] += agent.writes - before


def _happen(cluster: Cluster, happening: Happening) -> None:
    agent, pod = happening.agent, happening.pod
    if happening.kind == "bound":
        agent.kubelet.held[pod] = happening.unit
        _set_phase(cluster, agent, pod, "Pending")
    elif happening.kind == "running":
        _set_phase(cluster, agent, pod, "Running")
    elif happening.kind == "ended":
        _set_phase(cluster, agent, pod, "Succeeded")
    elif happening.kind == "released":
        agent.kubelet.held.pop(pod, None)
    else:
        cluster.delete_pod(pod)
        agent.phases.pop(pod, None)
    agent.await_watch()
    if happening.unit[1]:
        agent.publications.changed()  # the ledger tells of grants and releases


def _set_phase(cluster: Cluster, agent: HollowAgent, pod: str, phase: str) -> None:
    cluster.put_pod(agent.name, pod, phase)
    agent.phases[pod] = phase


def _moments(chance: random.Random, begin: float, end: float, per_hour: float) -> Iterator[float]:
    now = begin
    while True:
        now += chance.expovariate(per_hour / 3600)
        if now >= end:
            return
        yield now
