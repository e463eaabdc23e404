"""What an ordinary pod pays for the relay in its chain, above the start of any program at all."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from cni.pods_file import path_of
from hack.sim.runtime import make_netns, remove_netns
from hack.sim.stage import Stage, wait
from measure.figures import Figures, quantile, spread
from measure.program import Program

PAUSE_SECONDS = 0.02
POD = "ordinary"
NEIGHBOURS = ("neighbour-0", "neighbour-1")
PREVIOUS: dict[str, Any] = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/run/netns/ordinary"}],
    "ips": [{"address": "10.244.0.9/24", "gateway": "10.244.0.1", "interface": 0}],
    "routes": [{"dst": "0.0.0.0/0"}],
    "dns": {},
}


def measure(stage: Stage, rounds: int, say: Callable[[str], None]) -> Figures:
    """Time a chained ADD: on a node where nothing is granted, beside pods that hold VFs, and without the agent."""
    stage.run_pod(POD, {})
    say(f"pass-through: {rounds} rounds with nothing granted on the node")
    idle, _ = _sample(stage, rounds)
    for name in NEIGHBOURS:
        stage.create_pod(name, {"rdma/vf": 1})
    for name in NEIGHBOURS:
        stage.await_pod(name)
    say(f"pass-through: {rounds} rounds beside {len(NEIGHBOURS)} pods with VFs")
    busy, nothing = _sample(stage, rounds)
    floor = quantile(nothing, 0.5)
    away = _without_agent(stage, rounds, say)
    stage.end_pods(POD, *NEIGHBOURS)
    return {
        "passthrough_p50_ms": quantile(busy, 0.5) - floor,
        "passthrough_no_grant_p50_ms": quantile(idle, 0.5) - floor,
        "passthrough_total_p50_ms": quantile(busy, 0.5),
        "passthrough_total_p99_ms": quantile(busy, 0.99),
        "bin_true_p50_ms": floor,
        **away,
    }


def _without_agent(stage: Stage, rounds: int, say: Callable[[str], None]) -> Figures:
    """Time ADD and DEL while the agent is away."""
    file = path_of(Path(stage.relay_environment["NODEFABRIC_CNI_SOCKET"]))
    wait("all pods on file", lambda: (file.exists() and "\nunknown 0\n" in file.read_text()) or None)
    stage.end("agent", signal.SIGKILL)
    say(f"pass-through: {rounds} rounds of ADD and DEL without the agent")
    adds, nothing = _sample(stage, rounds)
    deletes, _ = _sample(stage, rounds, "DEL")
    figures = spread("passthrough_away_add", adds) | spread("passthrough_away_del", deletes)
    figures["passthrough_away_p50_ms"] = figures["passthrough_away_add_p50_ms"] - quantile(nothing, 0.5)
    stage.start_agent()
    stage.await_ready()
    return figures


def _sample(stage: Stage, rounds: int, command: str = "ADD") -> tuple[list[float], list[float]]:
    """Run the relay and /bin/true in turn."""
    netns = stage.folder / "netns" / "bench-ordinary"
    make_netns(netns)
    text = json.dumps({"cniVersion": "1.0.0", "name": "cluster", "type": "nodefabric", "prevResult": PREVIOUS}).encode()
    environment = {
        **stage.relay_environment,
        "PATH": os.defpath,
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": "bench-ordinary",
        "CNI_NETNS": str(netns),
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={POD};K8S_POD_UID={POD}",
        "CNI_PATH": stage.cni_path,
    }
    relayed, nothing = [], []
    try:
        with closing(Program(stage.relay.resolve())) as relay, closing(Program(Path("/bin/true"))) as true:
            for _ in range(rounds):
                time.sleep(PAUSE_SECONDS)
                nothing.append(true.run(environment, text).milliseconds)
                time.sleep(PAUSE_SECONDS)
                run = relay.run(environment, text)
                is_passed = run.output == b"" if command == "DEL" else json.loads(run.output) == PREVIOUS
                if run.status != 0 or not is_passed:
                    raise RuntimeError(f"the relay did not pass the result on: {run.output.decode(errors='replace')}")
                relayed.append(run.milliseconds)
    finally:
        remove_netns(netns)
    return relayed, nothing
