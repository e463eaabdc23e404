"""A publisher against a stand-in for the API server, over real HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent.cluster.apiserver import ApiServer
from hack.sim.cluster.apiserver import ApiServerStandIn, Counts, Fault
from tests.agent.cluster.topology.published import CHANGED, SLOW, Node, Rig
from tests.awaiting import until


def opened(server: ApiServerStandIn, folder: Path) -> ApiServer:
    path = folder / "kubeconfig"
    path.write_text(server.kubeconfig())
    return ApiServer.from_kubeconfig(path)


def test_a_silent_server_delays_neither_the_loop_nor_the_end(tmp_path: Path) -> None:
    async def scenario(client: ApiServer) -> None:
        async with Rig(client, Node()):
            for _ in range(50):
                await asyncio.sleep(0.005)

    with ApiServerStandIn() as server:
        server.state.set_fault(Fault(delay_seconds=10))
        client = opened(server, tmp_path)
        asyncio.run(scenario(client))
        assert server.state.counts == Counts()  # all this while nothing was answered
        client.close()


def test_over_real_http_the_object_arrives_and_heals_after_faults(tmp_path: Path) -> None:
    async def scenario(client: ApiServer, server: ApiServerStandIn) -> None:
        node = Node()
        async with Rig(client, node) as rig:
            await until(lambda: server.state.counts.applies == 1)
            server.state.set_fault(Fault(status=429, retry_after=0))
            node.document = CHANGED
            rig.publisher.changed()
            await until(lambda: rig.writes("Unavailable") >= 2)
            server.state.set_fault(Fault(drop=True))
            await until(lambda: rig.writes("Unavailable") >= 4)
            server.state.set_fault(None)
            await until(lambda: server.state.counts.changes == 2)

    with ApiServerStandIn() as server:
        client = opened(server, tmp_path)
        asyncio.run(scenario(client, server))
        client.close()


def test_over_real_http_a_fight_with_another_writer_is_seen_and_said(tmp_path: Path) -> None:
    with ApiServerStandIn() as server:
        client = opened(server, tmp_path)
        rig = Rig(client, Node(CHANGED), SLOW)
        rig.pass_time(0, 16)
        theirs = {"metadata": {}, "zones": [{"name": "node-1", "type": "Node"}]}
        server.state.apply("NodeResourceTopology", "worker-1", theirs, "nfd-topology-updater", force=True)
        rig.pass_time(16, 620)
        stored = server.state.get("NodeResourceTopology", "worker-1")
        assert stored is not None
        assert stored["zones"] == CHANGED["zones"]
        assert "nfd-topology-updater writes .zones" in str(rig.publisher.problem)
        assert server.state.counts.conflicts == 1
        client.close()
