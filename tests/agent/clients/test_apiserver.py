from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.clients.apiserver import ApiServer
from agent.errors import ConfigError, Refused, Unavailable
from agent.sim.apiserver import ApiServerStandIn, Fault

TOPOLOGY = {
    "apiVersion": "topology.node.k8s.io/v1alpha2",
    "kind": "NodeResourceTopology",
    "metadata": {"name": "worker-1"},
    "zones": [{"name": "node-0", "type": "Node"}],
}


@pytest.fixture
def server() -> Iterator[ApiServerStandIn]:
    with ApiServerStandIn() as running:
        yield running


@pytest.fixture
def client(server: ApiServerStandIn, tmp_path: Path) -> Iterator[ApiServer]:
    path = tmp_path / "kubeconfig"
    path.write_text(server.kubeconfig())
    opened = ApiServer.from_kubeconfig(path)
    yield opened
    opened.close()


def test_the_nodes_uid_is_read(server: ApiServerStandIn, client: ApiServer) -> None:
    uid = server.state.add_node("worker-1")
    assert client.node_uid("worker-1") == uid


def test_an_object_is_applied_as_nodefabric(server: ApiServerStandIn, client: ApiServer) -> None:
    client.apply_topology(TOPOLOGY)
    stored = server.state.get("NodeResourceTopology", "worker-1")
    assert stored is not None
    assert stored["zones"] == TOPOLOGY["zones"]
    assert stored["metadata"]["managedFields"][0]["manager"] == "nodefabric"


def test_another_writers_object_is_taken_over(server: ApiServerStandIn, client: ApiServer) -> None:
    server.state.apply("NodeResourceTopology", "worker-1", {**TOPOLOGY, "zones": []}, "nfd", force=False)
    client.apply_topology(TOPOLOGY)
    stored = server.state.get("NodeResourceTopology", "worker-1")
    assert stored is not None
    assert stored["zones"] == TOPOLOGY["zones"]


def test_a_refusal_says_why(client: ApiServer) -> None:
    with pytest.raises(Refused, match="404 /api/v1/nodes/worker-9 not found") as caught:
        client.node_uid("worker-9")
    assert caught.value.status == 404


@pytest.mark.parametrize(("status", "remedy"), [(404, "CustomResourceDefinition"), (403, "rbac.yaml")])
def test_a_refusal_names_the_remedy(server: ApiServerStandIn, client: ApiServer, status: int, remedy: str) -> None:
    server.state.set_fault(Fault(status=status))
    with pytest.raises(Refused, match=remedy):
        client.apply_topology(TOPOLOGY)


def test_an_overloaded_server_says_when_to_come_back(server: ApiServerStandIn, client: ApiServer) -> None:
    server.state.set_fault(Fault(status=429, retry_after=7))
    with pytest.raises(Unavailable, match="429") as caught:
        client.apply_topology(TOPOLOGY)
    assert caught.value.retry_after == 7
    assert not isinstance(caught.value, Refused)


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(drop=True)])
def test_a_failing_server_is_unavailable_and_asked_once_only(
    server: ApiServerStandIn, client: ApiServer, fault: Fault
) -> None:
    server.state.set_fault(fault)
    with pytest.raises(Unavailable):
        client.apply_topology(TOPOLOGY)
    assert server.state.counts.failures == 1


def test_the_connection_works_again_after_a_drop(server: ApiServerStandIn, client: ApiServer) -> None:
    server.state.set_fault(Fault(drop=True, times=1))
    with pytest.raises(Unavailable):
        client.apply_topology(TOPOLOGY)
    client.apply_topology(TOPOLOGY)


def test_nobody_listening_is_unavailable(tmp_path: Path) -> None:
    with ApiServerStandIn() as server:
        text = server.kubeconfig()
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(Unavailable, match="does not answer"):
        ApiServer.from_kubeconfig(path).node_uid("worker-1")


@pytest.mark.parametrize("text", ["", "[1]", "a: [", '{"apiVersion": "v1", "kind": "Config"}'])
def test_a_bad_kubeconfig_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a usable kubeconfig"):
        ApiServer.from_kubeconfig(path)


def account(folder: Path, token: str = "first") -> Path:
    (folder / "token").write_text(token)
    (folder / "ca.crt").write_text("not read before the first connection")
    return folder


def test_in_cluster_takes_address_and_token_of_the_pod(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    client: Any = ApiServer.in_cluster(environ, account(tmp_path))
    configuration = client._client.configuration
    assert configuration.host == "https://[fd00::1]:443"
    assert configuration.auth_settings()["BearerToken"]["value"] == "bearer first"


def test_outside_a_pod_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kubeconfig"):
        ApiServer.in_cluster({}, account(tmp_path))
    environ = {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(ConfigError, match="token"):
        ApiServer.in_cluster(environ, tmp_path / "absent")


def test_a_broken_authority_certificate_is_unavailable(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
        with pytest.raises(Unavailable):
            ApiServer.in_cluster(environ, account(tmp_path)).node_uid("worker-1")


def test_the_package_is_not_imported_before_a_client_is_opened() -> None:
    code = "import agent.clients.apiserver, agent.topology.publisher, sys, json; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"kubernetes", "urllib3"} & set(json.loads(done.stdout))
