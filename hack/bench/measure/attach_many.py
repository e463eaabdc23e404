"""ADD and DEL of many pods at once, in turn with host-device: sixteen VFs in, sixteen VFs back.

The kernel moves one link at a time, whoever asks (the RTNL lock is held across the wait in
rcu_barrier), so sixteen at once take about sixteen times as long as one, for every plugin. What
differs is what each plugin adds to that, and how evenly the pods fare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.hardware import recorded
from hack.sim.machine import SimulatedMachine
from hack.sim.stage import Stage
from measure.attach import NODE, pause
from measure.contender import Contender, Host
from measure.figures import Figures, quantile, spread
from measure.program import Program, Run

PODS = 16
WARM_ROUNDS = 1
BACK_SECONDS = 30.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Team:
    """One plugin's pods, each with a VF of its own."""

    pods: tuple[Contender, ...]
    threads: ThreadPoolExecutor

    def at_once(self, work: Callable[[Contender], Run]) -> list[float]:
        """Let all pods do the same at once, and return each one's milliseconds."""
        return [run.milliseconds for run in self.threads.map(work, self.pods)]

    def await_back(self, began: float) -> float:
        """Wait until every VF is in the host again, and return the milliseconds since the DELs began."""
        while missing := [pod.link for pod in self.pods if not pod.in_host()]:
            if time.perf_counter() > began + BACK_SECONDS:
                raise RuntimeError(f"{', '.join(missing)} not back {BACK_SECONDS:g} s after DEL")
            time.sleep(0.002)
        return (time.perf_counter() - began) * 1000


@dataclass
class Sample:
    add: list[float] = field(default_factory=list)
    delete: list[float] = field(default_factory=list)
    all_back: list[float] = field(default_factory=list)
    """From the first DEL until the last VF was in the host again, one for each round."""


def measure(stage: Stage, machine: SimulatedMachine, host_device: Path, rounds: int, say: Say) -> Figures:
    """Let both plugins attach and detach sixteen VFs at once. The agent runs on the stage already."""
    with _teams(stage, machine, host_device) as teams:
        say(f"attach: {rounds} rounds of {PODS} pods at once, in turn with host-device")
        samples = [Sample() for _ in teams]
        for number in range(-WARM_ROUNDS, rounds):
            if number == 0:
                samples = [Sample() for _ in teams]
            players = list(zip(teams, samples, strict=True))
            for team, sample in players if number % 2 else reversed(players):
                _round(f"many-{number + WARM_ROUNDS}", team, sample)
    ours, theirs = samples
    figures = {
        **spread("add_16", ours.add),
        **spread("del_16", ours.delete),
        **spread("del_16_all_back", ours.all_back),
        **spread("host_device_add_16", theirs.add),
        **spread("host_device_del_16", theirs.delete),
        **spread("host_device_del_16_all_back", theirs.all_back),
    }
    for name, command in (("add_16", theirs.add), ("del_16", theirs.delete), ("del_16_all_back", theirs.all_back)):
        figures[f"{name}_ratio_host_device"] = figures[f"{name}_p50_ms"] / quantile(command, 0.5)
    return figures


def _round(container_id: str, team: Team, sample: Sample) -> None:
    pause()
    sample.add += team.at_once(lambda pod: pod.add(f"{container_id}-{pod.link}"))
    pause()
    began = time.perf_counter()
    sample.delete += team.at_once(lambda pod: pod.delete(f"{container_id}-{pod.link}"))
    sample.all_back.append(team.await_back(began))


@contextmanager
def _teams(stage: Stage, machine: SimulatedMachine, host_device: Path) -> Iterator[tuple[Team, Team]]:
    with ExitStack() as stack:
        here, there = Host(fresh=False, threads=PODS), Host(fresh=True, threads=PODS)
        stack.callback(here.close)
        stack.callback(there.close)
        other = stage.folder / "others"
        stack.callback(SimulatedMachine.destroy, other)
        there.do(lambda: SimulatedMachine.create(other, recorded.load(recorded.find(NODE))))
        vfs = [device for device in machine.scan().devices if device.is_vf and device.netdev][:PODS]

        def pod(
            host: Host, path: Path, config: Mapping[str, Any], environment: Mapping[str, str], link: str
        ) -> Contender:
            program = Program(path)
            stack.callback(program.close)
            contender = Contender(program, host, config, environment, link)
            contender.make_pod(stage.folder / "netns" / f"{contender.name}-{link}")
            stack.callback(contender.end_pod)
            return contender

        ours, theirs = [], []
        for vf in vfs:
            assert vf.netdev is not None
            link = vf.netdev.name
            config = {"type": "nodefabric", "deviceID": vf.address}
            ours.append(pod(here, stage.relay.resolve(), config, stage.relay_environment, link))
            theirs.append(pod(there, host_device, {"type": "host-device", "device": link}, {}, link))
        teams = []
        for pods in (ours, theirs):
            threads = ThreadPoolExecutor(PODS)
            stack.callback(threads.shutdown)
            teams.append(Team(tuple(pods), threads))
        yield teams[0], teams[1]
