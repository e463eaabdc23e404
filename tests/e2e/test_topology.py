"""The topology object, from the agent's process to an API server over HTTP."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from agent.sim.apiserver import ApiServerStandIn, Fault
from agent.sim.stage import CONFIG, Stage, wait

NODE, KIND = "sim-node", "NodeResourceTopology"


@pytest.fixture
def api(own_network: None) -> Iterator[ApiServerStandIn]:
    with ApiServerStandIn() as server:
        server.state.add_node(NODE)
        yield server


def play(stage: Stage, api: ApiServerStandIn) -> None:
    """Start kubelet and an agent that publishes."""
    (stage.folder / "kubelet.yaml").write_text("{topologyManagerPolicy: single-numa-node, topologyManagerScope: pod}")
    (stage.folder / "kubeconfig").write_text(api.kubeconfig())
    topology = {
        "publish": True,
        "coalesceSeconds": 0.1,
        "startSpreadSeconds": 0,
        "kubeletConfig": str(stage.folder / "kubelet.yaml"),
    }
    stage.build_node("h100-8gpu", with_links=False)
    stage.write_config({**CONFIG, "topology": topology})
    stage.write_conflist()
    stage.start_kubelet("--seed", "7")
    stage.start_agent("--kubeconfig", str(stage.folder / "kubeconfig"))
    stage.await_ready()


def published(api: ApiServerStandIn) -> dict[str, Any] | None:
    return api.state.get(KIND, NODE)


def available(api: ApiServerStandIn, resource: str) -> int | None:
    """Add up what the zones say is available; None if the resource is not in the object."""
    zones = (published(api) or {}).get("zones", [])
    amounts = [int(item["available"]) for zone in zones for item in zone["resources"] if item["name"] == resource]
    return sum(amounts) if amounts else None


def await_available(api: ApiServerStandIn, resource: str, amount: int) -> None:
    wait(f"{amount} of {resource} to be available", lambda: True if available(api, resource) == amount else None)


def test_the_object_follows_the_pods_and_is_written_on_change_only(stage: Stage, api: ApiServerStandIn) -> None:
    play(stage, api)
    await_available(api, "rdma/hca", 504)
    document = published(api)
    assert document is not None
    assert [zone["name"] for zone in document["zones"]] == ["node-0", "node-1"]
    assert document["metadata"]["ownerReferences"][0]["name"] == NODE
    attributes = {item["name"]: item["value"] for item in document["attributes"]}
    assert attributes["topologyManagerPolicy"] == "single-numa-node"
    assert attributes["topologyManagerScope"] == "pod"

    stage.create_pod("a", {"rdma/hca": 2})
    stage.await_pod("a")
    await_available(api, "rdma/hca", 502)
    stage.delete_pod("a")
    stage.await_no_pod("a")
    await_available(api, "rdma/hca", 504)

    counts = api.state.counts
    assert counts.applies == counts.changes
    assert f'outcome="accepted"}} {counts.applies:.1f}' in stage.fetch("/metrics")


@pytest.mark.parametrize(
    "fault", [Fault(status=500), Fault(drop=True), Fault(delay_seconds=20)], ids=["error", "drop", "silence"]
)
def test_a_failing_api_server_harms_nothing(stage: Stage, api: ApiServerStandIn, fault: Fault) -> None:
    api.state.set_fault(fault)
    play(stage, api)
    stage.create_pod("a", {"rdma/hca": 1})
    stage.await_pod("a")
    if not fault.delay_seconds:
        wait("the failure to be said", lambda: "cannot be published" in stage.log("agent") or None)
        api.state.set_fault(None)
        await_available(api, "rdma/hca", 503)
    stage.delete_pod("a")
    stage.await_no_pod("a")
    process = stage.processes["agent"]
    assert stage.end("agent", signal.SIGTERM) < 2
    assert process.returncode == 0
