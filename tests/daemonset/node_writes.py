"""What an agent writes of its node, as the API server asks the admission policy about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from agent.cluster.apiserver import ApiServer
from agent.cluster.node_events import NodeEvents
from agent.offer.offer import Offer
from agent.process.conditions import Conditions
from agent.state import Latest
from tests.daemonset.admission import Policy, Request
from tests.daemonset.manifests import REPOSITORY, Document, Kube

NODE, OTHER = "gpu-7", "gpu-8"
OBJECTS = REPOSITORY / "tests/agent/cluster/topology/objects"
ACCOUNT = "system:serviceaccount:nodefabric:nodefabric"
CLAIM = "authentication.kubernetes.io/node-name"


def published(name: str) -> Document:
    """An object as the publisher makes it."""
    document: Document = json.loads((OBJECTS / f"{name}.json").read_text())
    assert document["metadata"]["name"] == NODE
    return document


def own_event() -> Document:
    """An event as the agent sends it."""

    async def first() -> Document:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Document] = loop.create_future()

        class Api(ApiServer):
            def create(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
                loop.call_soon_threadsafe(told.set_result, dict(document))
                return {}

        conditions = Conditions()
        conditions.set("config", "a new error")
        running = asyncio.ensure_future(NodeEvents(Api(None), NODE, Latest(Offer()), conditions).run())
        try:
            async with asyncio.timeout(60):
                return await told
        finally:
            running.cancel()

    return asyncio.run(first())


def node(name: str = NODE, **metadata: Any) -> Document:
    taint = {"key": "example.com/maintenance", "effect": "NoSchedule"}
    plain = {"name": name, "labels": {"kubernetes.io/hostname": name}, "annotations": {"a": "1"}}
    return {"metadata": {**plain, **metadata}, "spec": {"taints": [taint], "podCIDR": "10.0.0.0/24"}, "status": {}}


def create(group: str, version: str, resource: str, document: Document) -> Request:
    return Request("CREATE", group, version, resource, ACCOUNT, {CLAIM: [NODE]}, document)


def update(changed: Document, old: Document | None = None) -> Request:
    return Request("UPDATE", "", "v1", "nodes", ACCOUNT, {CLAIM: [NODE]}, changed, old or node())


TOPOLOGY = create("topology.node.k8s.io", "v1alpha2", "noderesourcetopologies", published("noderesourcetopology"))
VOLCANO = create("nodeinfo.volcano.sh", "v1alpha1", "numatopologies", published("numatopology"))
EVENT = create("", "v1", "events", own_event())
LABELS = update(
    node(
        labels={"kubernetes.io/hostname": NODE, "example.com/rails": "8"},
        annotations={"a": "1", "example.com/load": "{}"},
    )
)
CONFIG: Document = {
    "publish": True,
    "volcano": True,
    "labels": {
        "keys": {
            "example.com/rails": "rails",
            "plain.example/leaf.{nic}": "leaf-switch",
            "plain.example/rail.{rail}-{plane}": "leaf-switch",
        }
    },
    "bandwidth": {"annotation": "example.com/load"},
}
WRITES = {"topology": TOPOLOGY, "volcano": VOLCANO, "event": EVENT, "labels": LABELS}


@pytest.fixture(scope="module")
def policy(kube: Kube) -> Policy:
    """The one that is installed with CONFIG."""
    return policy_in(kube.template({"config": {"topology": CONFIG}}))


def policy_in(found: list[Document]) -> Policy:
    (document,) = [d for d in found if d["kind"] == "ValidatingAdmissionPolicy"]
    return Policy(document)


def messages(policy: Policy, request: Request) -> list[str]:
    denials = policy.denials(request)
    assert denials is not None, "the policy does not look at this"
    return [denial.message for denial in denials]
