"""ADD and DEL of a VF, in turn with host-device and a former version: one pod at a time, and no IPAM at first.

Moving a link to another network namespace waits in rcu_barrier(), which is most of the time of both
plugins and depends on what the kernel was doing just before. So every call begins after a pause, and
the order changes from round to round. The pause varies by more than a timer tick: such
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agent.hardware import recorded
from hack.sim.machine import SimulatedMachine
from measure.breakdown import breakdown
from measure.contender import BareMove, Contender, Host, Played
from measure.figures import Figures, quantile, ratios, spread
from measure.program import Program

NODE = "h100-8gpu"
POD_LINKS = 110
"""Each pod's veth: kubelet takes so many pods by default."""
VF_LINKS = 1024
PAUSE_SECONDS = (0.1, 0.12)
BACK_SECONDS = 5.0
WARM_ROUNDS = 3
THEIRS = "host_device_"
"""How figures of the peer begin."""

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
    contenders: Mapping[str, Contender]
    """By the prefix of their figures."""
    kernel: BareMove


def measure(played: Mapping[str, Played], host_device: Path, rounds: int, say: Say) -> Figures:
    """Let all plugins attach and detach a VF of the same node. The agents, by the prefix of their figures, run already.

    First on the node as it is, then all with addresses from host-local, then without again but with as many
    more interfaces as a host full of pods has, and as one with 1,024 VFs has.
    """
    stage = played[""].stage
    figures: Figures = {}
    for kind, more, leased in (
        ("", 0, False),
        ("leased_", 0, True),
        ("podded_", POD_LINKS, False),
        ("crowded_", VF_LINKS, False),
    ):
        with _players(played, host_device, stage.folder / "leases" if leased else None) as players:
            for contender in players.contenders.values():
                contender.host.do(partial(_have_more_links, more))
            counts = [contender.host.do(_count_links) for contender in players.contenders.values()]
            if len(set(counts)) != 1:
                raise RuntimeError(
                    f"the hosts have {' and '.join(map(str, counts))} interfaces: nothing can be compared"
                )
            with_what = " with host-local on all sides," if leased else ""
            say(f"attach: {rounds} rounds of ADD and DEL, in turn with host-device,{with_what} {counts[0]} interfaces")
            found = {**_figures(players, rounds, partial(stage.fetch, "/metrics"), say), "links": counts[0]}
        figures |= {f"{kind}{name}": value for name, value in found.items()}
    return figures


def _figures(players: Players, rounds: int, metrics: Callable[[], str], say: Say) -> Figures:
    names = list(players.contenders)
    program = players.contenders[""].program
    samples: dict[str, Sample] = {}
    moves: list[float] = []
    program_moves: list[float] = []
    before = ""
    for number in range(-WARM_ROUNDS, rounds):
        if number in (-WARM_ROUNDS, 0):
            samples = {name: Sample() for name in names}
            moves.clear()
            program_moves.clear()
            before = metrics()
        first = number % len(names)
        order = {name: players.contenders[name] for name in names[first:] + names[:first]}
        _round(f"bench-{number + WARM_ROUNDS}", order, samples)
        pause()
        moves.append(players.kernel.move())
        pause()
        program_moves.append(players.kernel.move(program))
        if number > 0 and number % 50 == 0:
            say(f"attach: {number} rounds")
    figures: Figures = {}
    for name, sample in samples.items():
        figures |= {**spread(f"{name}add", sample.add), **spread(f"{name}del", sample.delete)}
        if name != THEIRS:  # it answers when the VF is back
            figures |= spread(f"{name}del_back", sample.back)
    figures |= {**spread("kernel_move", moves), **spread("program_move", program_moves)}
    figures |= breakdown("add", before, metrics(), samples[""].add)
    theirs = samples[THEIRS]
    for name, command in (("add", theirs.add), ("del", theirs.delete), ("del_back", theirs.delete)):
        figures[f"{name}_ratio_host_device"] = figures[f"{name}_p50_ms"] / quantile(command, 0.5)
    return {**figures, **ratios(figures, "add", "del", "del_back")}


def _round(container_id: str, order: Mapping[str, Contender], samples: Mapping[str, Sample]) -> None:
    for name, contender in order.items():
        pause()
        samples[name].add.append(contender.add(container_id).milliseconds)
    for name, contender in order.items():
        pause()
        deleted = contender.delete(container_id)
        samples[name].delete.append(deleted.milliseconds)
        samples[name].back.append(_await_back(contender, deleted.began))


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
def _players(played: Mapping[str, Played], host_device: Path, leases: Path | None) -> Iterator[Players]:
    """Make all plugins' hosts and pods. `leases` is where host-local keeps its books; None for no IPAM."""
    with ExitStack() as stack:
        folder = played[""].stage.folder
        there = Host(fresh=True)
        stack.callback(there.close)
        other = Path(tempfile.mkdtemp(dir=folder)) / "node"
        stack.callback(SimulatedMachine.destroy, other)
        there.do(lambda: SimulatedMachine.create(other, recorded.load(recorded.find(NODE))))
        vf, spare = [one for one in played[""].machine.scan().devices if one.is_vf and one.netdev][:2]
        assert vf.netdev is not None
        assert spare.netdev is not None
        link = vf.netdev.name
        pods: dict[str, Path] = {}

        def contender(
            path: Path, host: Host, name: str, config: Mapping[str, str], env: Mapping[str, str]
        ) -> Contender:
            program = Program(path)
            stack.callback(program.close)
            made = Contender(program, host, {**config, **_ipam(leases, f"{name}leases")}, env, link)
            pods[name] = made.make_pod(folder / "netns" / f"{name}pod")
            stack.callback(made.end_pod)
            return made

        config = {"type": "nodefabric", "deviceID": vf.address}
        contenders = {
            name: contender(one.stage.relay.resolve(), one.host, name, config, one.stage.relay_environment)
            for name, one in played.items()
        }
        contenders[THEIRS] = contender(host_device, there, THEIRS, {"type": "host-device", "device": link}, {})
        yield Players(contenders, BareMove(there, spare.netdev.name, pods[THEIRS]))


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
