"""What an ordinary pod pays for the relay in its chain, above the start of any program at all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from agent.sim.runtime import make_netns, remove_netns
from agent.sim.stage import Stage
from measure.figures import Figures, quantile
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
    """Time a chained ADD: on a node where nothing is granted, and beside pods that hold VFs."""
    stage.create_pod(POD, {})
    stage.await_pod(POD)
    say(f"pass-through: {rounds} rounds with nothing granted on the node")
    idle, _ = _sample(stage, rounds)
    for name in NEIGHBOURS:
        stage.create_pod(name, {"rdma/vf": 1})
    for name in NEIGHBOURS:
        stage.await_pod(name)
    say(f"pass-through: {rounds} rounds beside {len(NEIGHBOURS)} pods with VFs")
    busy, nothing = _sample(stage, rounds)
    floor = quantile(nothing, 0.5)
    for name in (POD, *NEIGHBOURS):
        stage.delete_pod(name)
    stage.await_no_pod(POD, *NEIGHBOURS)
    return {
        "passthrough_p50_ms": quantile(busy, 0.5) - floor,
        "passthrough_no_grant_p50_ms": quantile(idle, 0.5) - floor,
        "passthrough_total_p50_ms": quantile(busy, 0.5),
        "passthrough_total_p99_ms": quantile(busy, 0.99),
        "bin_true_p50_ms": floor,
    }


def _sample(stage: Stage, rounds: int) -> tuple[list[float], list[float]]:
    """Run the relay and /bin/true in turn."""
    netns = stage.folder / "netns" / "bench-ordinary"
    make_netns(netns)
    text = json.dumps({"cniVersion": "1.0.0", "name": "cluster", "type": "nodefabric", "prevResult": PREVIOUS}).encode()
    environment = {
        **stage.relay_environment,
        "PATH": os.defpath,
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "bench-ordinary",
        "CNI_NETNS": str(netns),
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={POD};K8S_POD_UID=",
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
                if run.status != 0 or json.loads(run.output) != PREVIOUS:
                    raise RuntimeError(f"the relay did not pass the result on: {run.output.decode(errors='replace')}")
                relayed.append(run.milliseconds)
    finally:
        remove_netns(netns)
    return relayed, nothing
