"""The stand-in for the API server over HTTP: applies, and who owns which field."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

from hypothesis import strategies as st

from hack.sim.cluster.apiserver import ApiServerStandIn, Counts

TOPOLOGY = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/worker-1"
APPLY = "application/apply-patch+yaml"


def topology(policy: str = "none", **changes: Any) -> dict[str, Any]:
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": "worker-1"},
        "attributes": [{"name": "topologyManagerPolicy", "value": policy}],
        "zones": [],
    } | changes


def call(
    port: int, method: str, path: str, document: Any = None, content_type: str = APPLY
) -> tuple[int, dict[str, Any], dict[str, str]]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        body = None if document is None and method == "GET" else json.dumps(document)
        connection.request(method, path, body, {"Content-Type": content_type})
        response = connection.getresponse()
        return response.status, json.loads(response.read()), dict(response.headers)


def apply(
    server: ApiServerStandIn, document: Any, query: str = "?fieldManager=nodefabric"
) -> tuple[int, dict[str, Any]]:
    return call(server.port, "PATCH", TOPOLOGY + query, document)[:2]


def test_apply_creates_then_changes_and_repeats_without_a_new_version() -> None:
    with ApiServerStandIn() as server:
        status, first = apply(server, topology())
        assert status == 201
        assert first["metadata"]["managedFields"][0]["manager"] == "nodefabric"
        status, same = apply(server, topology())
        assert (status, same["metadata"]) == (200, first["metadata"])
        status, changed = apply(server, topology("restricted"))
        assert changed["metadata"]["uid"] == first["metadata"]["uid"]
        assert changed["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]
        assert call(server.port, "GET", TOPOLOGY)[1] == changed
        size = server.state.counts.applied_bytes
        assert size > 3 * len(json.dumps(topology()))
        assert server.state.counts == Counts(reads=1, applies=3, changes=2, applied_bytes=size)


values = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["x", "y"]), max_size=3)
documents = st.builds(lambda labels, spec: {"metadata": {"labels": labels}, "spec": spec}, values, values)
