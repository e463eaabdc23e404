"""ADD and DEL of a VF, in turn with host-device: one pod at a time, no IPAM on either side.

Moving a link to another network namespace waits in rcu_barrier(), which is most of the time of both
plugins and depends on what the kernel was doing just before. So every call begins after a pause, and
the order of the two changes from round to round. The pause varies by more than a timer tick: such
waits end on ticks, and pauses of a whole number of ticks would have every call begin equally far from one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agent.sim import recorded
from agent.sim.machine import SimulatedMachine
from agent.sim.stage import Stage
from measure.contender import Contender, Host
from measure.figures import Figures, quantile, spread
from measure.program import Program

NODE = "h100-8gpu"
PAUSE_SECONDS = (0.1, 0.12)
BACK_SECONDS = 5.0
WARM_ROUNDS = 3

Sample = dict[str, list[float]]


def measure(
    stage: Stage, machine: SimulatedMachine, host_device: Path, rounds: int, say: Callable[[str], None]
) -> Figures:
    """Let both plugins attach and detach a VF of the same node. The agent runs on the stage already."""
    with _contenders(stage, machine, host_device) as (ours, theirs):
        samples = {ours: _sample(), theirs: _sample()}
        say(f"attach: {rounds} rounds of ADD and DEL, {ours.name} and {theirs.name} in turn")
        for number in range(-WARM_ROUNDS, rounds):
            _round(number, (ours, theirs) if number % 2 else (theirs, ours), samples)
            if number > 0 and number % 50 == 0:
                say(f"attach: {number} rounds")
    mine, other = samples[ours], samples[theirs]
    figures = {
        **spread("add", mine["add"]),
        **spread("del", mine["del"]),
        **spread("del_back", mine["back"]),
        **spread("host_device_add", other["add"]),
        **spread("host_device_del", other["del"]),
    }
    for name, command in (("add", "add"), ("del", "del"), ("del_back", "del")):
        figures[f"{name}_ratio_host_device"] = figures[f"{name}_p50_ms"] / quantile(other[command], 0.5)
    return figures


def _sample() -> Sample:
    return {"add": [], "del": [], "back": []}


def _round(number: int, order: tuple[Contender, Contender], samples: dict[Contender, Sample]) -> None:
    container_id = f"bench-{number + WARM_ROUNDS}"
    for contender in order:
        time.sleep(random.uniform(*PAUSE_SECONDS))
        added = contender.add(container_id)
        if number >= 0:
            samples[contender]["add"].append(added.milliseconds)
    for contender in order:
        time.sleep(random.uniform(*PAUSE_SECONDS))
        deleted = contender.delete(container_id)
        back = _await_back(contender, deleted.began)
        if number >= 0:
            samples[contender]["del"].append(deleted.milliseconds)
            samples[contender]["back"].append(back)


def _await_back(contender: Contender, began: float) -> float:
    """Wait until the VF is in the host again, and return the milliseconds since the DEL began."""
    while not contender.in_host():
        if time.perf_counter() > began + BACK_SECONDS:
            raise RuntimeError(f"{contender.name}: {contender.link} is not back {BACK_SECONDS:g} s after its DEL")
        time.sleep(0.001)
    return (time.perf_counter() - began) * 1000


@contextmanager
def _contenders(stage: Stage, machine: SimulatedMachine, host_device: Path) -> Iterator[tuple[Contender, Contender]]:
    with ExitStack() as stack:
        here, there = Host(fresh=False), Host(fresh=True)
        stack.callback(here.close)
        stack.callback(there.close)
        other = stage.folder / "other"
        stack.callback(SimulatedMachine.destroy, other)
        there.do(lambda: SimulatedMachine.create(other, recorded.load(recorded.find(NODE))))
        programs = Program(stage.relay.resolve()), Program(host_device)
        for program in programs:
            stack.callback(program.close)
        vf = next(device for device in machine.scan().devices if device.is_vf and device.netdev)
        assert vf.netdev is not None
        link = vf.netdev.name
        ours = Contender(
            programs[0], here, {"type": "nodefabric", "deviceID": vf.address}, stage.relay_environment, link
        )
        theirs = Contender(programs[1], there, {"type": "host-device", "device": link}, {}, link)
        for contender in (ours, theirs):
            contender.make_pod(stage.folder / "netns" / contender.name)
            stack.callback(contender.end_pod)
        yield ours, theirs
