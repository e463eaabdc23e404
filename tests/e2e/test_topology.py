"""The node's topology object, as the API server has it."""

from __future__ import annotations

import time
from typing import Any

from agent.errors import AgentError
from hack.sim.scheduler import call, start_api_server
from hack.sim.stage import CONFIG, Stage, settled, wait

OBJECT = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/sim-node"
FOR_VOLCANO = "/apis/nodeinfo.volcano.sh/v1alpha1/numatopologies/sim-node"
RAILS = "example.com/rails"


def has(port: int, path: str) -> bool:
    try:
        call(port, "GET", path)
    except AgentError:
        return False
    return True


def available(document: dict[str, Any], resource: str) -> list[str]:
    return [r["available"] for zone in document["zones"] for r in zone["resources"] if r["name"] == resource]


def test_the_object_follows_the_pods_and_rests_otherwise_and_a_dead_api_server_holds_up_none(stage: Stage) -> None:
    stage.build_node("h100-8gpu")
    topology = {
        "publish": True,
        "volcano": True,
        "labels": {"keys": {RAILS: "rails"}},
        "settleSeconds": 1,
        "startSpreadSeconds": 0,
    }
    port = start_api_server(stage)
    stage.run({**CONFIG, "topology": topology}, "--kubeconfig", str(stage.folder / "kubeconfig"))

    def vfs() -> list[str]:
        return available(call(port, "GET", OBJECT), "rdma/vf")

    wait("the object", lambda: has(port, OBJECT) or None)
    assert settled(lambda: [] if vfs() == ["32", "32"] else [str(vfs())]) == []
    wait("its owner", lambda: call(port, "GET", OBJECT)["metadata"].get("ownerReferences"))
    document = call(port, "GET", OBJECT)
    assert [zone["name"] for zone in document["zones"]] == ["node-0", "node-1"]
    assert document["metadata"]["ownerReferences"][0]["kind"] == "Node"

    def labels() -> dict[str, str]:
        found: dict[str, str] = call(port, "GET", "/api/v1/nodes/sim-node")["metadata"]["labels"]
        return found

    assert settled(lambda: [] if labels().get(RAILS) == "8" else [str(labels())]) == []
    wait("the object for Volcano", lambda: has(port, FOR_VOLCANO) or None)
    assert call(port, "GET", FOR_VOLCANO)["spec"]["numares"]["cpu"] == {"allocatable": "0-223", "capacity": 224}

    stage.run_pod("a", {"rdma/vf": 2, "nvidia.com/gpu": 1})
    assert settled(lambda: [] if sorted(vfs()) == ["30", "32"] else [str(vfs())]) == []

    def is_at_rest() -> bool:
        before = call(port, "GET", "/_sim/counts")["applies"]
        time.sleep(3)
        return bool(call(port, "GET", "/_sim/counts")["applies"] == before)

    wait("no more writes", lambda: is_at_rest() or None)
    assert "nodefabric.io/unchanged-since" in call(port, "GET", OBJECT)["metadata"]["annotations"]

    stage.end_pods("a")
    assert settled(lambda: [] if vfs() == ["32", "32"] else [str(vfs())]) == []

    stage.end("apiserver")
    stage.run_pod("b", {"rdma/vf": 1})
    stage.end_pods("b")
    process = stage.processes["agent"]
    stage.end("agent")
    assert process.returncode == 0  # by itself, then
