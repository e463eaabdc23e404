"""`with-exclusive-resources` means other pods in scheduler-plugins' releases (up to v0.34.7) than on its master branch.

Both are read from pkg/noderesourcetopology/resourcerequests/exclusive.go. Where the agent counts other pods than the
scheduler that runs, the fingerprints never agree.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent.cluster.topology.noderesourcetopology import fingerprint
from agent.config import parse
from tests.agent.cluster.publications import Rig
from tests.awaiting import until


def asks(**requests: str) -> dict[str, Any]:
    return {"name": "c", "resources": {"requests": requests}}


VF = asks(**{"rdma/vf": "1"})
ELSEWHERE = asks(**{"vendor.com/license": "1"})
"""A resource that is in no zone."""
CPUS = asks(cpu="2", memory="1Gi")
SHARED_CPU = asks(cpu="500m")
RELEASED, MASTER, BOTH, NEITHER = {"v0.34"}, {"master"}, {"v0.34", "master"}, set[str]()
PODS: dict[str, tuple[set[str], str, dict[str, Any]]] = {
    "plain": (NEITHER, "BestEffort", {"containers": [{"name": "c"}]}),
    "device": (BOTH, "BestEffort", {"containers": [VF]}),
    "elsewhere": (RELEASED, "BestEffort", {"containers": [ELSEWHERE]}),
    "init-device": (RELEASED, "BestEffort", {"containers": [{"name": "c"}], "initContainers": [VF]}),
    "init-elsewhere": (RELEASED, "BestEffort", {"containers": [{"name": "c"}], "initContainers": [ELSEWHERE]}),
    "sidecar-device": (
        BOTH,
        "BestEffort",
        {"containers": [{"name": "c"}], "initContainers": [{**VF, "restartPolicy": "Always"}]},
    ),
    "sidecar-elsewhere": (
        RELEASED,
        "BestEffort",
        {"containers": [{"name": "c"}], "initContainers": [{**ELSEWHERE, "restartPolicy": "Always"}]},
    ),
    "cpus": (BOTH, "Guaranteed", {"containers": [CPUS]}),
    "burstable-cpus": (NEITHER, "Burstable", {"containers": [CPUS]}),
    "shared-cpu": (NEITHER, "Guaranteed", {"containers": [SHARED_CPU]}),
    "init-cpus": (RELEASED, "Guaranteed", {"containers": [SHARED_CPU], "initContainers": [CPUS]}),
    "burstable-init-cpus": (NEITHER, "Burstable", {"containers": [SHARED_CPU], "initContainers": [CPUS]}),
}
"""Pod → which of the two count it, its QoS class, its spec."""


def published(folder: Path, words: str) -> str:
    """Publish with these words of a configuration, and return the fingerprint."""
    text = f"topology: {{publish: true, startSpreadSeconds: 0, fingerprint: {words}}}"

    async def scenario() -> str:
        rig = Rig(folder, parse(text, "test").topology)
        rig.server.state.add_node("worker-1")
        for name, (_, qos, spec) in PODS.items():
            rig.server.state.put_pod("worker-1", "ns", name, "Pending", qosClass=qos, spec=spec)
        async with rig:
            await until(lambda: rig.fingerprint() == fingerprint([]))
            for name, (_, qos, spec) in PODS.items():
                # kubelet need not list these: they have ended.
                rig.server.state.put_pod("worker-1", "ns", name, "Succeeded", qosClass=qos, spec=spec)
            wanted = [fingerprint(named(of)) for of in ("v0.34", "master")]
            await until(lambda: rig.fingerprint() in wanted)
            return rig.fingerprint() or ""

    return asyncio.run(scenario())


def named(rules: str) -> list[tuple[str, str]]:
    return [("ns", name) for name, (of, _, _) in PODS.items() if rules in of]


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        ("{method: with-exclusive-resources}", "v0.34"),
        ("{method: with-exclusive-resources, rules: v0.34}", "v0.34"),
        ("{method: with-exclusive-resources, rules: master}", "master"),
    ],
)
def test_the_fingerprint_is_that_of_the_scheduler_that_runs(tmp_path: Path, words: str, rules: str) -> None:
    assert published(tmp_path, words) == fingerprint(named(rules))
