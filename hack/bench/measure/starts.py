"""From exec to registered: how long a node refuses pods when the agent starts anew, on the node with 1,024 VFs.

Real processes over real sockets: the agent is ended and started again; time runs from just before its exec until the
kubelet stand-in has a list of every resource, which is when it would admit pods. The books are those of the agent
before. The topology is to be published, as it is by the chart's defaults.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from hack.sim.stage import Stage, wait
from measure.agent_process import RESOURCES, running_agents
from measure.figures import Figures, quantile
from measure.former import Version

WARM_STARTS = 1
POLL_SECONDS = 0.002
PAUSE_SECONDS = 1.0
"""Between registered and the end: what a start does later is not to be in the next one's way."""


def measure(versions: Mapping[str, Version], starts: int, say: Callable[[str], None]) -> Figures:
    """Start the agents again and again, in turn. `versions` are by the prefix of their figures."""
    samples: dict[str, list[float]] = {name: [] for name in versions}
    with ExitStack() as stack:
        stages = running_agents(stack, versions, publish=True, say=say)
        say(f"starts: {starts} times until kubelet has the lists of {len(RESOURCES)} resources")
        full = {name: _allocatable(stage) for name, stage in stages.items()}
        for number in range(WARM_STARTS + starts):
            for name in sorted(stages, reverse=bool(number % 2)):
                samples[name].append(_restart(stages[name], full[name]))
    figures: Figures = {}
    for name, sample in samples.items():
        figures[f"{name}start_to_registered_ms"] = quantile(sample[WARM_STARTS:], 0.5)
        figures[f"{name}start_to_registered_p99_ms"] = quantile(sample[WARM_STARTS:], 0.99)
    return figures


def _restart(stage: Stage, full: Mapping[str, int]) -> float:
    """End the agent, start it, and return the milliseconds until kubelet has all units again."""
    time.sleep(PAUSE_SECONDS)
    stage.end("agent")
    wait("kubelet to miss the agent", lambda: not any(_allocatable(stage).values()) or None)
    # The image's Python is compiled, this checkout's need not be: the first start compiles it.
    environment = {"PYTHONPYCACHEPREFIX": str(stage.folder / "pycache"), "PYTHONDONTWRITEBYTECODE": ""}
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
