from __future__ import annotations

import json
import signal
import subprocess
import sys
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest

from hack.sim.cluster.apiserver import ApiServerStandIn, Counts, Fault
from tests.waiting import until

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
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        body = None if document is None and method == "GET" else json.dumps(document)
        connection.request(method, path, body, {"Content-Type": content_type})
        response = connection.getresponse()
        return response.status, json.loads(response.read()), dict(response.headers)
    finally:
        connection.close()


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


def test_another_managers_object_is_a_conflict_without_force() -> None:
    with ApiServerStandIn() as server:
        apply(server, topology(), "?fieldManager=nfd")
        assert apply(server, topology("restricted"))[0] == 409
        status, taken = apply(server, topology("restricted"), "?fieldManager=nodefabric&force=true")
        owned = {entry["manager"]: set(entry["fieldsV1"]) for entry in taken["metadata"]["managedFields"]}
        assert status == 200
        assert owned == {"nfd": {"f:zones"}, "nodefabric": {"f:attributes", "f:zones"}}


@pytest.mark.parametrize(
    ("document", "query", "content_type", "status"),
    [
        (topology(), "", APPLY, 400),
        (topology(), "?fieldManager=x", "application/merge-patch+json", 415),
        (topology(kind="Node"), "?fieldManager=x", APPLY, 400),
        (topology(metadata={"name": "other"}), "?fieldManager=x", APPLY, 400),
        (topology(zones=None), "?fieldManager=x", APPLY, 422),
    ],
)
def test_a_wrong_apply_is_refused(document: Any, query: str, content_type: str, status: int) -> None:
    with ApiServerStandIn() as server:
        got, answer, _ = call(server.port, "PATCH", TOPOLOGY + query, document, content_type)
        assert (got, answer["kind"]) == (status, "Status")


def test_faults_last_as_long_as_told() -> None:
    with ApiServerStandIn() as server:
        server.state.set_fault(Fault(status=429, retry_after=7, times=1))
        status, _, headers = call(server.port, "PATCH", f"{TOPOLOGY}?fieldManager=x", topology())
        assert (status, headers["Retry-After"]) == (429, "7")
        assert apply(server, topology())[0] == 201
        server.state.set_fault(Fault(drop=True))
        with pytest.raises(RemoteDisconnected):
            apply(server, topology())
        server.state.set_fault(None)
        assert apply(server, topology())[0] == 200


def test_it_runs_as_a_process_and_takes_faults_over_http(tmp_path: Path) -> None:
    port_file, kubeconfig = tmp_path / "port", tmp_path / "kubeconfig"
    command = [sys.executable, "-m", "hack.sim.cluster.apiserver", "--port-file", str(port_file)]
    process = subprocess.Popen([*command, "--kubeconfig", str(kubeconfig), "--node", "worker-1"])
    try:
        until(port_file.exists)
        port = int(port_file.read_text())
        assert json.loads(kubeconfig.read_text())["clusters"][0]["cluster"]["server"] == f"http://127.0.0.1:{port}"
        assert call(port, "GET", "/api/v1/nodes/worker-1")[0] == 200
        assert call(port, "PUT", "/_sim/fault", {"status": 500})[0] == 200
        assert call(port, "GET", "/api/v1/nodes/worker-1")[0] == 500
        assert call(port, "PUT", "/_sim/fault", None)[0] == 200
        counted = {name: count for name, count in call(port, "GET", "/_sim/counts")[1].items() if count}
        assert counted == {"reads": 1, "failures": 1}
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_merge_patch_of_a_node_is_for_the_version_that_it_names() -> None:
    with ApiServerStandIn() as server:
        server.state.add_node("n")
        node = call(server.port, "GET", "/api/v1/nodes/n")[1]
        patch = {
            "metadata": {"resourceVersion": node["metadata"]["resourceVersion"]},
            "spec": {"taints": [{"key": "a"}]},
        }

        def merge(document: dict[str, Any]) -> tuple[int, Any]:
            path = "/api/v1/nodes/n?fieldManager=x"
            return call(server.port, "PATCH", path, document, "application/merge-patch+json")[:2]

        status, changed = merge(patch)
        assert (status, changed["spec"]) == (200, {"taints": [{"key": "a"}]})
        assert changed["status"] == node["status"]
        assert merge(patch)[0] == 409
        assert merge({"spec": {"taints": None}})[1]["spec"] == {}
