"""Somebody updates the agent of a node that has claims, or whose agent taints it when it ends."""

from __future__ import annotations

import asyncio

from hack.sim.cluster.apiserver import ApiServerStandIn
from hack.sim.scheduler import by_claims, claim, create, devices, kubelet_options, start_api_server
from hack.sim.stage import CONFIG, NODE, Stage, wait
from tests.e2e.conftest import stage
from tests.hostile.updating import RESOURCES, Agents, node

__all__ = ["stage"]


def test_claims_go_on_after_an_update_and_only_the_next_agent_is_found(stage: Stage) -> None:
    stage.build_node("h100-8gpu")
    stage.write_config(by_claims(CONFIG))
    port = start_api_server(stage)
    stage.start_kubelet(*kubelet_options(port))
    agents = Agents(stage, ("--kubeconfig", str(stage.folder / "kubeconfig")))
    old = agents.start()
    agents.await_ready(old)
    wait("all slices", lambda: "ResourceSlices are published" in stage.log(old) or None)
    first, second, *_ = offered = vfs(port)
    before, after = ({"name": name, "uid": f"{name * 8}-2222-4333-8444-555555555555"} for name in ("a", "b"))
    claim(port, "of-a", before, {"request": "nic", "device": first})
    create(stage, before, ["of-a"])
    stage.await_pod("a")

    registered = sockets(stage)
    assert len(registered) == 2
    new = agents.start()
    agents.await_ready(new)
    assert sockets(stage) == registered  # who waits makes none
    claim(port, "of-b", after, {"request": "nic", "device": second})
    stage.processes[old].terminate()
    create(stage, after, ["of-b"])
    assert agents.end(old) == 0
    stage.await_pod("b")
    wait("the driver", lambda: "registered with kubelet as DRA driver" in stage.log(new) or None)
    assert len(sockets(stage)) == 2
    assert not sockets(stage) & registered
    wait("the same slices", lambda: vfs(port) == offered or None)
    stage.end_pods("a", "b")


def vfs(port: int) -> list[str]:
    """List the VFs in the slices."""
    return sorted(device["name"] for device in devices(port) if device["name"].startswith("vf-"))


def sockets(stage: Stage) -> set[str]:
    """List the sockets by which kubelet finds the driver, and asks it."""
    found = (*stage.folder.glob("kubelet/plugins_registry/*"), *stage.folder.glob("kubelet/plugins/*/*.sock"))
    return {path.name for path in found}


def test_an_update_does_not_wait_for_a_taint_where_the_next_agent_waits(stage: Stage) -> None:
    async def scenario(server: ApiServerStandIn) -> None:
        (stage.folder / "kubeconfig").write_text(server.kubeconfig())
        server.state.add_node(NODE)
        async with node(stage, {**RESOURCES, "restart": {"taint": True, "waitSeconds": 5}}) as stream:
            agents = Agents(stage, ("--kubeconfig", str(stage.folder / "kubeconfig")))
            old = agents.start()
            await stream.until_offered()
            await asyncio.to_thread(agents.await_ready, old)
            new = await asyncio.to_thread(agents.update, old)
            await stream.until_offered()
            assert server.state.counts.merges == 0
            assert "tainted the Node" not in stage.log(old)
            await asyncio.to_thread(agents.await_ready, new)

            assert await asyncio.to_thread(agents.end, new) == 0  # nobody waits now
            assert "tainted the Node" in stage.log(new)
            assert server.state.counts.merges == 1

    with ApiServerStandIn() as server:
        asyncio.run(scenario(server))
