"""ADD and DEL of a VF, in turn with host-device: one pod at a time, and no IPAM on either side at first.

Moving a link to another network namespace waits in rcu_barrier(), which is most of the time of both
plugins and depends on what the kernel was doing just before. So every call begins after a pause, and
the order of the two changes from round to round. The pause varies by more than a timer tick: such
waits end on ticks, and pauses of a whole number of ticks would have every call begin equally far from one.
What the kernel takes for the move alone is measured beside them, and for the move while a program is started that
does nothing: no plugin can be faster than that.
"""

from __future__ import annotations

import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agent.sim import recorded
from agent.sim.machine import SimulatedMachine
from agent.sim.stage import Stage
from measure.breakdown import breakdown
from measure.contender import BareMove, Contender, Host
from measure.figures import Figures, quantile, spread
from measure.program import Program

NODE = "h100-8gpu"
POD_LINKS = 110
"""Each pod's veth: kubelet takes so many pods by default."""
VF_LINKS = 1024
PAUSE_SECONDS = (0.1, 0.12)
BACK_SECONDS = 5.0
WARM_ROUNDS = 3

Say = Callable[[str], None]


@dataclass
class Sample:
    """Milliseconds of one contender."""

    add: list[float] = field(default_factory=list)
    delete: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    """Until the VF was in the host again, where the answer comes earlier."""


@dataclass(frozen=True)
class Players:
    ours: Contender
    theirs: Contender
    kernel: BareMove


def measure(stage: Stage, machine: SimulatedMachine, host_device: Path, rounds: int, say: Say) -> Figures:
    """Let both plugins attach and detach a VF of the same node. The agent runs on the stage already.

    First on the node as it is, then both with addresses from host-local, then without again but with as many
    more interfaces as a host full of pods has, and as one with 1,024 VFs has.
    """
    figures: Figures = {}
    for kind, more, leased in (
        ("", 0, False),
        ("leased_", 0, True),
        ("podded_", POD_LINKS, False),
        ("crowded_", VF_LINKS, False),
    ):
        with _players(stage, machine, host_device, stage.folder / "leases" if leased else None) as players:
            for contender in (players.ours, players.theirs):
                contender.host.do(partial(_have_more_links, more))
            counts = [contender.host.do(_count_links) for contender in (players.ours, players.theirs)]
            if len(set(counts)) != 1:
                raise RuntimeError(
                    f"the hosts have {' and '.join(map(str, counts))} interfaces: nothing can be compared"
                )
            with_what = " with host-local on both sides," if leased else ""
            say(f"attach: {rounds} rounds of ADD and DEL, in turn with host-device,{with_what} {counts[0]} interfaces")
            found = {**_figures(players, rounds, stage, say), "links": counts[0]}
        figures |= {f"{kind}{name}": value for name, value in found.items()}
    return figures


def _figures(players: Players, rounds: int, stage: Stage, say: Say) -> Figures:
    ours, theirs = Sample(), Sample()
    samples = {players.ours: ours, players.theirs: theirs}
    moves: list[float] = []
    program_moves: list[float] = []
    before = ""
    for number in range(-WARM_ROUNDS, rounds):
        if number == 0:
            samples[players.ours], samples[players.theirs] = ours, theirs = Sample(), Sample()
            moves.clear()
            program_moves.clear()
            before = stage.fetch("/metrics")
        order = (players.ours, players.theirs) if number % 2 else (players.theirs, players.ours)
        _round(f"bench-{number + WARM_ROUNDS}", order, samples)
        pause()
        moves.append(players.kernel.move())
        pause()
        program_moves.append(players.kernel.move(players.ours.program))
        if number > 0 and number % 50 == 0:
            say(f"attach: {number} rounds")
    figures = {
        **spread("add", ours.add),
        **spread("del", ours.delete),
        **spread("del_back", ours.back),
        **spread("host_device_add", theirs.add),
        **spread("host_device_del", theirs.delete),
        **spread("kernel_move", moves),
        **spread("program_move", program_moves),
        **breakdown("add", before, stage.fetch("/metrics"), ours.add),
    }
    for name, command in (("add", theirs.add), ("del", theirs.delete), ("del_back", theirs.delete)):
        figures[f"{name}_ratio_host_device"] = figures[f"{name}_p50_ms"] / quantile(command, 0.5)
    return figures


def _round(container_id: str, order: tuple[Contender, Contender], samples: dict[Contender, Sample]) -> None:
    for contender in order:
        pause()
        samples[contender].add.append(contender.add(container_id).milliseconds)
    for contender in order:
        pause()
        deleted = contender.delete(container_id)
        samples[contender].delete.append(deleted.milliseconds)
        samples[contender].back.append(_await_back(contender, deleted.began))


def pause() -> None:
    """Let the kernel finish what the last call left to do."""
    time.sleep(random.uniform(*PAUSE_SECONDS))


def _await_back(contender: Contender, began: float) -> float:
    """Wait until the VF is in the host again, and return the milliseconds since the DEL began."""
    while not contender.in_host():
        if time.perf_counter() > began + BACK_SECONDS:
            raise RuntimeError(f"{contender.name}: {contender.link} is not back {BACK_SECONDS:g} s after its DEL")
        time.sleep(0.001)
    return (time.perf_counter() - began) * 1000


@contextmanager
def _players(stage: Stage, machine: SimulatedMachine, host_device: Path, leases: Path | None) -> Iterator[Players]:
    """Make both plugins' hosts and pods. `leases` is where host-local keeps its books; None for no IPAM."""
    with ExitStack() as stack:
        here, there = Host(fresh=False), Host(fresh=True)
        stack.callback(here.close)
        stack.callback(there.close)
        other = Path(tempfile.mkdtemp(dir=stage.folder)) / "node"
        stack.callback(SimulatedMachine.destroy, other)
        there.do(lambda: SimulatedMachine.create(other, recorded.load(recorded.find(NODE))))
        programs = Program(stage.relay.resolve()), Program(host_device)
        for program in programs:
            stack.callback(program.close)
        vf, spare = [device for device in machine.scan().devices if device.is_vf and device.netdev][:2]
        assert vf.netdev is not None
        assert spare.netdev is not None
        link = vf.netdev.name
        ours = Contender(
            programs[0],
            here,
            {"type": "nodefabric", "deviceID": vf.address, **_ipam(leases, "ours")},
            stage.relay_environment,
            link,
        )
        theirs = Contender(
            programs[1], there, {"type": "host-device", "device": link, **_ipam(leases, "theirs")}, {}, link
        )
        pods = [contender.make_pod(stage.folder / "netns" / contender.name) for contender in (ours, theirs)]
        for contender in (ours, theirs):
            stack.callback(contender.end_pod)
        yield Players(ours, theirs, BareMove(there, spare.netdev.name, pods[1]))


def _ipam(leases: Path | None, whose: str) -> dict[str, Any]:
    if leases is None:
        return {}
    return {"ipam": {"type": "host-local", "dataDir": str(leases / whose), "subnet": "10.99.0.0/16"}}


def _count_links() -> int:
    return len(subprocess.run(["ip", "-o", "link"], check=True, capture_output=True).stdout.splitlines())


def _have_more_links(count: int) -> None:
    """Have so many interfaces beside the node's: pairs, of which some may be there already."""
    there = {name for _, name in socket.if_nameindex()}
    missing = [n for n in range(count // 2) if f"more{n}" not in there]
    pairs = "".join(f"link add more{n} type veth peer name even{n}\n" for n in missing)
    subprocess.run(["ip", "-batch", "-"], input=pairs, text=True, check=True)
