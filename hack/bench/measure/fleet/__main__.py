"""The command line of the fleet benchmark."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agent.cluster.apiserver import POD
from agent.cluster.object_watch import read_pod
from agent.config import Resource, Select
from agent.config.topology import Fingerprint, Topology
from agent.hardware import recorded
from agent.hardware.sysfs import scan as sysfs
from agent.model.device import Snapshot
from agent.offer.units import plain_offer
from hack.sim.demo import UNSHARE
from measure.figures import Figures
from measure.fleet import scrape
from measure.fleet.churn import Clock, lives, step_through
from measure.fleet.hollow import Cluster, HollowAgent, Units
from measure.footprint import resident_mib

CHECKOUT = Path(__file__).parents[4]
NODE = CHECKOUT / "tests/nodes/h100-8gpu.json"
MELLANOX = Select(vendors=(0x15B3,))
RESOURCES = (Resource("rdma/hca", "hca", MELLANOX), Resource("rdma/vf", "vf", MELLANOX))
DAY = 86400.0
HOUR = 3600.0
SETTLED = 120.0
"""By then every agent has written its object for the first time, and come to rest."""
FLEET = 10_000


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write."""
    options = _parser().parse_args(arguments)
    if not options.inside:
        _enter_namespaces(arguments)
    logging.getLogger("agent").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="nf-fleet-", dir="/var/tmp") as folder:
        recorded.unpack(recorded.load(NODE), Path(folder))
        snapshot = sysfs.scan(Path(folder))
    units = plain_offer(RESOURCES, snapshot).offered
    figures: Figures = {"hollow_agents": options.agents}
    # The fleet first: memory that earlier work has left free would hide what the agents take.
    figures |= _fleet(snapshot, units, options)
    figures |= _one_node(snapshot, units, options)
    if options.scrapes:
        figures |= scrape.measure(options.relay, options.scrapes, _say)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps({name: round(value, 4) for name, value in figures.items()}, indent=1) + "\n")
    print("\n" + "\n".join(f"{name:<36}{value:>14,.2f}" for name, value in figures.items()))
    print("\n" + "\n".join(_extrapolated(figures)) + f"\n\nThe figures are in {options.report}", flush=True)
    return 0


def _one_node(snapshot: Snapshot, units: Units, options: argparse.Namespace) -> Figures:
    """A day of one node: first idle, then with pods that come and go."""
    with _cluster(1) as (cluster, kubeconfig):
        clock = Clock()
        agent = HollowAgent("node-0", kubeconfig, _config(), snapshot, units, clock)
        _say("one node: an idle day")
        asyncio.run(step_through(clock, cluster, [agent], [], SETTLED))
        writes, reads = agent.api.writes, agent.api.reads
        asyncio.run(step_through(clock, cluster, [agent], [], SETTLED + DAY))
        idle_writes, idle_reads = agent.api.writes - writes, agent.api.reads - reads
        _say(f"one node: a day with {options.pods_per_hour:g} pods an hour")
        happenings = lives([agent], units, clock.now, clock.now + DAY - 4 * HOUR, options.pods_per_hour, seed=1)
        pods = sum(happening.kind == "bound" for happening in happenings)
        before, counted = agent.api.writes, cluster.counts()
        asyncio.run(step_through(clock, cluster, [agent], happenings, clock.now + DAY))
        after = cluster.counts()
        _check(agent)
        return {
            "idle_writes_per_node_per_hour": idle_writes / 24,
            "idle_reads_per_node_per_hour": idle_reads / 24,
            "churn_pods_per_day": pods,
            "churn_writes_per_day": agent.api.writes - before,
            "churn_writes_per_pod": (agent.api.writes - before) / pods,
            "bytes_per_write": (after["applied_bytes"] - counted["applied_bytes"])
            / (after["applies"] - counted["applies"]),
        }


def _fleet(snapshot: Snapshot, units: Units, options: argparse.Namespace) -> Figures:
    """Many nodes that start at once, and then have pods that come and go."""
    with _cluster(options.agents) as (cluster, kubeconfig):
        clock = Clock()
        _warm_up(kubeconfig, snapshot, units, clock)
        gc.collect()
        empty = resident_mib(os.getpid())
        agents = [
            HollowAgent(f"node-{n}", kubeconfig, _config(), snapshot, units, clock) for n in range(options.agents)
        ]
        _say(f"{len(agents)} nodes start at once")
        starting = asyncio.run(step_through(clock, cluster, agents, [], SETTLED))
        gc.collect()
        full = resident_mib(os.getpid())
        _say(f"{len(agents)} nodes with {options.pods_per_hour:g} pods an hour each, for {options.minutes:g} minutes")
        end = clock.now + options.minutes * 60
        happenings = lives(agents, units, clock.now, end, options.pods_per_hour, seed=2)
        seconds, began = end - clock.now, time.monotonic()
        writes = asyncio.run(step_through(clock, cluster, agents, happenings, end))
        _say(f"that took {time.monotonic() - began:.0f} s")
        for agent in agents:
            _check(agent)
            agent.close()
        return {
            "memory_per_agent_mib": (full - empty) / len(agents),
            "start_writes_per_node": sum(starting.values()) / len(agents),
            "start_peak_writes_per_second": max(starting.values()),
            "fleet_writes_per_second": sum(writes.values()) / seconds,
            "fleet_peak_writes_per_second": max(writes.values()),
            "fleet_bytes_per_second": cluster.counts()["applied_bytes"]
            * sum(writes.values())
            / cluster.counts()["applies"]
            / seconds,
        }


def _warm_up(kubeconfig: Path, snapshot: Snapshot, units: Units, clock: Clock) -> None:
    """Load all that the first agent of a process loads, so that it does not count for the others."""
    agent = HollowAgent("node-0", kubeconfig, Topology(), snapshot, units, clock)
    agent.api.list_of(POD, {"spec.nodeName": "node-0"}, read_pod)
    agent.close()


def _config() -> Topology:
    # kubelet's defaults; and the watch of pods, which costs the API server most.
    return Topology(publish=True, kubelet_config=Path(os.devnull), fingerprint=Fingerprint("dedicated"))


def _check(agent: HollowAgent) -> None:
    if agent.complaints:
        raise SystemExit(f"{agent.name} could not publish: {agent.complaints}")


def _extrapolated(figures: Figures) -> list[str]:
    """Say what so much means for a large cluster."""
    scale = FLEET / figures["hollow_agents"]
    idle = (
        figures["idle_writes_per_node_per_hour"] * FLEET / HOUR,
        figures["idle_reads_per_node_per_hour"] * FLEET / HOUR,
    )
    busy = figures["fleet_writes_per_second"] * scale, figures["fleet_bytes_per_second"] * scale / 1e6
    spread = Topology().start_spread_seconds
    start = figures["start_writes_per_node"] * FLEET / spread
    return [
        f"{FLEET:,} nodes, idle: {idle[0]:.1f} writes/s, {idle[1]:.1f} reads/s out of the API server's cache",
        f"{FLEET:,} nodes with so many pods: {busy[0]:,.0f} writes/s, {busy[1]:.2f} MB/s",
        f"{FLEET:,} nodes that start at once: {start:,.0f} writes/s for {spread:g} s",
    ]


@contextmanager
def _cluster(nodes: int) -> Iterator[tuple[Cluster, Path]]:
    """Run the stand-in in a process of its own: its memory and its work are not the agents'."""
    with tempfile.TemporaryDirectory(prefix="nf-fleet-", dir="/var/tmp") as folder:
        port_file, kubeconfig = Path(folder) / "port", Path(folder) / "kubeconfig"
        names = [option for n in range(nodes) for option in ("--node", f"node-{n}")]
        command = [
            sys.executable,
            "-m",
            "hack.sim.cluster.apiserver",
            "--port-file",
            port_file,
            "--kubeconfig",
            kubeconfig,
        ]
        process = subprocess.Popen([*map(str, command), *names])
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    raise SystemExit("the stand-in for the API server did not start")
                time.sleep(0.02)
            yield Cluster(int(port_file.read_text())), kubeconfig
        finally:
            process.terminate()
            process.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hack/bench/fleet",
        description="Count what agents ask of the API server, over real HTTP and with the time passed in: a day of one"
        " node, and many nodes in one process. Then scrape a real agent on the node with 1,024 VFs.",
    )
    add = parser.add_argument
    add("--agents", type=int, default=200, help="hollow agents in one process (default: %(default)s)")
    add("--pods-per-hour", type=float, default=20.0, help="pods that start on each node (default: %(default)s)")
    add("--minutes", type=float, default=20.0, help="how long the many nodes have pods (default: %(default)s)")
    add("--scrapes", type=int, default=20, help="scrapes of the large node; 0: none (default: %(default)s)")
    add("--relay", type=Path, default=CHECKOUT / "build/shim/native/nodefabric-cni", help="default: %(default)s")
    add("--report", type=Path, default=CHECKOUT / "build/reports/fleet.json", help="default: %(default)s")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def _enter_namespaces(arguments: Sequence[str]) -> None:
    """Become the same command in fresh namespaces. An ordinary user becomes root of a user namespace."""
    command = [UNSHARE, "--net", "--mount", "--propagation", "private"]
    if os.geteuid() != 0:
        command += ["--user", "--map-root-user"]
    module = [sys.executable, "-m", "measure.fleet", "--inside", *arguments]
    os.execv(UNSHARE, [*command, "/bin/sh", "-c", 'ip link set lo up; exec "$@"', "sh", *module])


def _say(text: str) -> None:
    print(f"bench: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
