"""From exec to registered: how long a node refuses pods when the agent starts anew, on the node with 1,024 VFs.

Real processes over real sockets: the agent is ended and started again; time runs from just before its exec until the
kubelet stand-in has a list of every resource, which is when it would admit pods. The books are those of the agent
before. The topology is to be published, as it is by the chart's defaults.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from agent.sim.stage import Stage, wait
from measure.agent_process import RESOURCES, running_agent
from measure.figures import Figures, quantile

WARM_STARTS = 1
POLL_SECONDS = 0.002
PAUSE_SECONDS = 1.0
"""Between registered and the end: what a start does later is not to be in the next one's way."""


def measure(relay: Path, starts: int, say: Callable[[str], None]) -> Figures:
    """Start the agent again and again."""
    with running_agent(relay, publish=True, say=say) as stage:
        say(f"starts: {starts} times until kubelet has the lists of {len(RESOURCES)} resources")
        full = _allocatable(stage)
        # The image's Python is compiled, this checkout's need not be: the first start compiles it.
        compiled = {"PYTHONPYCACHEPREFIX": str(stage.folder / "pycache"), "PYTHONDONTWRITEBYTECODE": ""}
        sample = [_restart(stage, full, compiled) for _ in range(WARM_STARTS + starts)][WARM_STARTS:]
    return {
        "start_to_registered_ms": quantile(sample, 0.5),
        "start_to_registered_p99_ms": quantile(sample, 0.99),
    }


def _restart(stage: Stage, full: Mapping[str, int], environment: Mapping[str, str]) -> float:
    """End the agent, start it, and return the milliseconds until kubelet has all units again."""
    time.sleep(PAUSE_SECONDS)
    stage.end("agent")
    wait("kubelet to miss the agent", lambda: not any(_allocatable(stage).values()) or None)
    began = time.perf_counter()
    agent = stage.start_agent("--kubeconfig", str(stage.folder / "kubeconfig"), env=environment)
    while _allocatable(stage) != full:
        time.sleep(POLL_SECONDS)
        if agent.poll() is not None or time.perf_counter() > began + 30:
            raise RuntimeError("kubelet has no lists 30 s after the start, or the agent ended")
    return (time.perf_counter() - began) * 1000


def _allocatable(stage: Stage) -> dict[str, int]:
    """Return how many healthy units kubelet has of each resource."""
    found: dict[str, int] = json.loads((stage.folder / "pods/node.json").read_text())["allocatable"]
    return found
