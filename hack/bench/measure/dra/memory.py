"""What the agent takes of memory with DRA, and what a node takes that offers nothing to claims.

Two runs of one agent differ by more than a MiB. So for the latter all modules about claims that such an agent has
loaded are loaded once more, many times, and the growth is divided. What the driver itself needs is not loaded there,
which a test of whole agents holds.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

from measure.dra.node import RunningNode
from measure.figures import Figures
from measure.footprint import cpu_percent, resident_mib

ABOUT_CLAIMS = re.compile(r"(agent|cni|deviceplugin)\.(.*\.)?(dra|claims?|claimed|claim_\w+)(\..*)?")
LOADED = (
    "agent.__main__",
    "agent.hardware.machine",
    "agent.main",
    "deviceplugin.dra.driver",
    "agent.cluster.publications",
)
SETTLE_SECONDS = 5.0
COPIES = 40
WARM_COPIES = 5

Say = Callable[[str], None]


def resident(node: RunningNode, say: Say) -> Figures:
    """Leave the agent alone for a moment, and see what it takes."""
    say("memory: the agent with DRA")
    pid = node.stage.processes["agent"].pid
    cpu_percent(pid, SETTLE_SECONDS)
    return {"agent_rss_mib": resident_mib(pid)}


def without(say: Say) -> Figures:
    """See what an agent takes for claims without any resource that is offered to them."""
    say("memory: what is loaded for claims on a node without them")
    command = [sys.executable, "-m", "measure.dra.memory"]
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    return {"rss_without_dra_extra_mib": float(json.loads(done.stdout))}


def main() -> None:
    """Print how many MiB one more copy of the modules about claims takes."""
    for name in LOADED:
        importlib.import_module(name)
    names = sorted(name for name in sys.modules if ABOUT_CLAIMS.fullmatch(name))
    kept = []
    before = 0.0
    for number in range(WARM_COPIES + COPIES):
        if number == WARM_COPIES:
            gc.collect()
            before = resident_mib(os.getpid())
        kept += [_copy(name) for name in names]
    gc.collect()
    print(json.dumps((resident_mib(os.getpid()) - before) / COPIES))


def _copy(name: str) -> object:
    """Load a module beside the one that is loaded already."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
