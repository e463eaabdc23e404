"""What an agent writes of its node, as the API server asks the admission policy about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agent.cluster.apiserver import ApiServer
from agent.cluster.node_events import NodeEvents
from agent.offer.offer import Offer
from agent.process.conditions import Conditions
from agent.state import Latest
from tests.daemonset.admission import Policy, Request
from tests.daemonset.manifests import REPOSITORY, Document

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
WRITES = {
    "topology": TOPOLOGY,
    "volcano": VOLCANO,
    "event": EVENT,
    "labels": LABELS,
    "topology again": replace(TOPOLOGY, operation="UPDATE", old_object=TOPOLOGY.object),
    "volcano again": replace(VOLCANO, operation="UPDATE", old_object=VOLCANO.object),
}

# ---------------------------------------------------------------------------------------------------------- of claims

DRIVER = "nodefabric.io"
OWN_NODE, OWN_DEVICES = "nodefabric-own-node", "nodefabric-own-devices"


def resource_slice(node: str = NODE, driver: str = DRIVER, pool: str | None = None) -> Document:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"00000-{driver}-{node}"},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": node if pool is None else pool, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "vf-0000-18-00-1"}],
        },
    }


def device(driver: str = DRIVER, **said: Any) -> Document:
    return {"driver": driver, "pool": NODE, "device": "vf-0000-18-00-1", **said}


def claim(*devices: Document, node: str = NODE) -> Document:
    """A claim that the scheduler has allocated on a node."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    result = {"request": "nic", "driver": DRIVER, "pool": node, "device": "vf-0000-18-00-1"}
    status: Document = {
        "allocation": {
            "devices": {"results": [result]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        },
        "reservedFor": [{"resource": "pods", "name": "p", "uid": "1"}],
    }
    if devices:
        status["devices"] = list(devices)
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"}, "status": status}


def on_slices(operation: str, new: Document | None, old: Document | None = None) -> Request:
    return Request(operation, "resource.k8s.io", "v1", "resourceslices", ACCOUNT, {CLAIM: [NODE]}, new, old)


def on_status(new: Document, old: Document) -> Request:
    return Request("UPDATE", "resource.k8s.io", "v1", "resourceclaims", ACCOUNT, {CLAIM: [NODE]}, new, old, "status")


WRITES_OF_CLAIMS = {
    "create": on_slices("CREATE", resource_slice()),
    "update": on_slices("UPDATE", resource_slice(), resource_slice()),
    "delete": on_slices("DELETE", None, resource_slice()),
    "first status": on_status(claim(device()), claim()),
    "later status": on_status(claim(device(data={"network": "rails"})), claim(device())),
    "status taken back": on_status(claim(), claim(device())),
}


def policy_in(found: list[Document], name: str = OWN_NODE) -> Policy:
    of_kind = [d for d in found if d["kind"] == "ValidatingAdmissionPolicy"]
    (document,) = [d for d in of_kind if d["metadata"]["name"].endswith(name.removeprefix("nodefabric"))]
    return Policy(document)


def messages(policy: Policy, request: Request) -> list[str]:
    denials = policy.denials(request)
    assert denials is not None, "the policy does not look at this"
    return [denial.message for denial in denials]
