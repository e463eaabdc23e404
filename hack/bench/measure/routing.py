"""A pod's four ADDs with `routing: source` and all that goes with it, in turn with the same without these keys.

Both lease from host-local, an address of each family for each VF; the VFs, the pod's namespace and the agent are the
same. What counts is the sum of the four, in pairs: both of one round meet the same noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hack.sim.machine import SimulatedMachine
from hack.sim.runtime import make_netns, remove_netns
from hack.sim.stage import Stage
from measure.attach import pause
from measure.contender import Contender, Host
from measure.figures import Figures, quantile, spread
from measure.program import Program

VFS = 4
WARM_ROUNDS = 2
BACK_SECONDS = 5.0
KEYS: Mapping[str, Any] = {
    "routing": "source",
    "routes": [{"dst": "10.0.0.0/8"}],
    "neighbours": [{"ip": "10.255.0.1", "mac": "02:00:00:00:00:01"}],
    "sysctls": {"arp_notify": 1},
}

Say = Callable[[str], None]


def measure(stage: Stage, machine: SimulatedMachine, rounds: int, say: Say) -> Figures:
    """Attach and detach four VFs both ways, in an order that changes. The agent runs on the stage already."""
    say(f"routing: {rounds} rounds of {VFS} ADDs with source routing, in turn with as many without")
    taken: dict[str, list[float]] = {"plain": [], "source": []}
    with _pods(stage, machine) as pods:
        for number in range(-WARM_ROUNDS, rounds):
            for kind in sorted(pods, reverse=bool(number % 2)):
                milliseconds = _round(f"{kind}-{number + WARM_ROUNDS}", pods[kind])
                if number >= 0:
                    taken[kind].append(milliseconds)
    plain, source = taken["plain"], taken["source"]
    ratios = [more / less for more, less in zip(source, plain, strict=True)]
    figures = {**spread("add_4_leased", plain), **spread("add_4_source", source)}
    figures["add_4_ratio_source"] = figures["add_4_source_p50_ms"] / figures["add_4_leased_p50_ms"]
    return {**figures, "add_4_ratio_source_in_pairs": quantile(ratios, 0.5)}


def _round(container_id: str, pod: list[Contender]) -> float:
    """Give a pod its VFs, one after the other, and take them back. Return the milliseconds of the ADDs."""
    total = 0.0
    for interface in pod:
        pause()
        total += interface.add(container_id).milliseconds
    for interface in pod:
        interface.delete(container_id)
    deadline = time.perf_counter() + BACK_SECONDS
    while missing := [interface.link for interface in pod if not interface.in_host()]:
        if time.perf_counter() > deadline:
            raise RuntimeError(f"{', '.join(missing)} not back {BACK_SECONDS:g} s after DEL")
        time.sleep(0.002)
    return total


@contextmanager
def _pods(stage: Stage, machine: SimulatedMachine) -> Iterator[Mapping[str, list[Contender]]]:
    """Make a pod's namespace, and four interfaces to come into it in each of the two ways."""
    vfs = [device for device in machine.scan().devices if device.is_vf and device.netdev][:VFS]
    host, program = Host(fresh=False), Program(stage.relay.resolve())
    netns = stage.folder / "netns" / "routing"
    try:
        made = {
            kind: [
                Contender(
                    program,
                    host,
                    {"type": "nodefabric", "deviceID": vf.address, **keys, "ipam": _ipam(stage.folder / "rails", n)},
                    stage.relay_environment,
                    str(vf.netdev.name if vf.netdev is not None else ""),
                    ifname=f"net{n}",
                )
                for n, vf in enumerate(vfs, 1)
            ]
            for kind, keys in (("plain", {}), ("source", KEYS))
        }
        make_netns(netns)
        for interface in (one for pod in made.values() for one in pod):
            interface.enter_pod(netns)
        yield made
    finally:
        remove_netns(netns)
        program.close()
        host.close()


def _ipam(leases: Path, number: int) -> dict[str, Any]:
    """Lease from subnets of the interface's own: of several in one, the agent makes something of itself."""
    ranges = [[{"subnet": f"10.{number}.0.0/16"}], [{"subnet": f"fd00:0:0:{number}::/64"}]]
    return {"type": "host-local", "dataDir": str(leases / str(number)), "ranges": ranges}
