"""GB200 and GB300 show 34 NUMA nodes without CPUs and devices; a scheduler enumerates combinations of all zones."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.hardware import recorded
from tests.agent.cluster.publications import QUICK, Rig
from tests.agent.cluster.topology.nodes import offered
from tests.awaiting import until


def published(folder: Path, node: str) -> dict[str, Any]:
    """Publish a modelled node with a unit on each socket, and return what the API server has of it."""
    root = folder / "root"
    recorded.unpack(recorded.load(Path(f"tests/nodes/{node}.json")), root)

    async def scenario() -> dict[str, Any]:
        rig = Rig(folder, replace(QUICK, volcano=True), root=root)
        rig.offer({"rdma/hca": (offered("a", 0), offered("b", 1))})
        async with rig:
            await until(lambda: bool(rig.stored() and rig.stored("Numatopology")))
            return {"topology": rig.stored(), "volcano": rig.stored("Numatopology")}

    return asyncio.run(scenario())


@pytest.mark.parametrize("node", ["gb200-4gpu", "gb300-4gpu"])
def test_a_scheduler_meets_only_zones_that_can_hold_a_pod(tmp_path: Path, node: str) -> None:
    document = published(tmp_path, node)["topology"]
    zones = document["zones"]
    assert [zone["name"] for zone in zones] == ["node-0", "node-1"]
    assert all([cost["name"] for cost in zone["costs"]] == ["node-0", "node-1"] for zone in zones)
    assert all(any(r["name"] == "rdma/hca" and r["available"] == "1" for r in zone["resources"]) for zone in zones)
    written = {key: value for key, value in document.items() if key != "metadata"}
    assert len(json.dumps(written)) < 4000


@pytest.mark.parametrize("node", ["gb200-4gpu", "gb300-4gpu"])
def test_volcano_meets_only_numa_nodes_with_cpus(tmp_path: Path, node: str) -> None:
    spec = published(tmp_path, node)["volcano"]["spec"]
    assert {detail["numa"] for detail in spec["cpuDetail"].values()} == {0, 1}
