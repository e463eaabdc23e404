"""The fleet benchmark's time and pods."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from measure.fleet.churn import Clock, Happening, step_through
from measure.fleet.hollow import Cluster, HollowAgent

from agent.config.topology import Fingerprint, Topology
from agent.model.device import NumaNode, Snapshot
from hack.sim.cluster.apiserver import ApiServerStandIn
from tests.agent.cluster.topology.nodes import offered

SNAPSHOT = Snapshot(numa_nodes=(NumaNode(0, (0, 1), 1 << 30), NumaNode(1, (2, 3), 1 << 30)))
UNITS = {"rdma/vf": tuple(offered(f"u{n}", n % 2) for n in range(8))}


class Fleet:
    """Some hollow agents and their cluster."""

    def __init__(self, folder: Path, server: ApiServerStandIn, count: int) -> None:
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(server.kubeconfig())
        self.clock = Clock()
        self.cluster = Cluster(server.port)
        (folder / "kubelet.yaml").touch()
        fingerprint = Fingerprint("dedicated")
        config = Topology(publish=True, kubelet_config=folder / "kubelet.yaml", fingerprint=fingerprint)
        self.agents = []
        for number in range(count):
            name = f"node-{number}"
            server.state.add_node(name)
            self.agents.append(HollowAgent(name, kubeconfig, config, SNAPSHOT, UNITS, self.clock))

    def pass_time(self, happenings: list[Happening], end: float) -> Counter[int]:
        return asyncio.run(step_through(self.clock, self.cluster, self.agents, happenings, end))


@pytest.fixture
def server() -> Iterator[ApiServerStandIn]:
    with ApiServerStandIn() as running:
        yield running


def test_idle_agents_write_and_settle_once_each_within_the_time_to_start(
    tmp_path: Path, server: ApiServerStandIn
) -> None:
    fleet = Fleet(tmp_path, server, 4)
    writes = fleet.pass_time([], 3600)
    assert sum(writes.values()) == server.state.counts.applies == 2 * 4
    assert max(second for second, count in writes.items() if count) <= 61 + 10
    assert [agent.complaints for agent in fleet.agents] == [[]] * 4
    for agent in fleet.agents:
        agent.close()
