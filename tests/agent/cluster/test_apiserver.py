from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import tracemalloc
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from urllib3 import HTTPResponse

from agent.cluster.apiserver import ITEMS_PER_PAGE, MAX_ANSWER_BYTES, NODE, POD, SLICE, ApiServer, body_of
from agent.cluster.apiserver import TOPOLOGY as KIND
from agent.errors import ConfigError, Conflicted, Refused, Unavailable
from hack.sim.cluster.apiserver import ApiServerStandIn, Fault
from tests.sim.cluster.dra_documents import resource_slice
from tests.waiting import until

HERE = {"spec.nodeName": "worker-1"}
TOPOLOGY = {
    "apiVersion": "topology.node.k8s.io/v1alpha2",
    "kind": "NodeResourceTopology",
    "metadata": {"name": "worker-1"},
    "zones": [{"name": "node-0", "type": "Node"}],
}


def name_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def test_of_the_node_only_the_metadata_is_asked(server: ApiServerStandIn, api: ApiServer) -> None:
    uid = server.state.add_node("worker-1", {"zone": "a"})
    found = api.metadata(NODE, "worker-1")
    assert found["uid"] == uid
    assert found["labels"]["zone"] == "a"
    assert "status" not in found


def test_another_writers_fields_are_a_conflict_that_names_both_and_force_takes_them(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    server.state.apply("NodeResourceTopology", "worker-1", {**TOPOLOGY, "zones": []}, "nfd", force=False)
    with pytest.raises(Conflicted, match="409 Apply failed with 1 conflict") as caught:
        api.apply(KIND, TOPOLOGY, force=False)
    assert caught.value.owners == ((".zones", "nfd"),)
    assert api.apply(KIND, TOPOLOGY, force=True)["zones"] == TOPOLOGY["zones"]


def test_pods_are_listed_page_by_page(server: ApiServerStandIn, api: ApiServer) -> None:
    for number in range(2 * ITEMS_PER_PAGE + 1):
        server.state.put_pod("worker-1", "ns", f"p{number:03}")
    version, listed = api.list_of(POD, HERE, name_of)
    assert listed == [f"p{number:03}" for number in range(2 * ITEMS_PER_PAGE + 1)]
    assert server.state.counts.lists == 3
    assert version == str(server.state.history.version)


def test_the_connection_of_a_watch_is_probed_while_nobody_says_anything(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    """A server that lost its power says nothing more: unprobed, its watch is taken for a quiet one for ten minutes."""

    def probed() -> bool:
        # Columns as net/ipv4/tcp_ipv4.c (get_tcp4_sock) writes them: timer 2 of a connection (state 1) is keepalive's.
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        mine = [row for row in rows if row[3] == "01" and int(row[2].rpartition(":")[2], 16) == server.port]
        return bool(mine) and all(row[5].startswith("02:") for row in mine)

    seen = api.watch(POD, HERE, "0", 30)
    server.state.put_pod("worker-1", "ns", "a")
    next(seen)
    until(probed)
    seen.close()  # type: ignore[attr-defined]  # a generator


def test_an_object_is_deleted_if_it_is_still_that_one(server: ApiServerStandIn, api: ApiServer) -> None:
    uid = api.apply(SLICE, resource_slice("a"), force=True)["metadata"]["uid"]
    with pytest.raises(Conflicted, match="Precondition failed"):
        api.delete(SLICE, "a", "another")
    assert api.delete(SLICE, "a", uid)
    assert not api.delete(SLICE, "a", uid)
    assert server.state.counts.deletes == 1


def test_requests_of_a_client_with_turns_are_under_way_together(server: ApiServerStandIn, tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text(server.kubeconfig())
    opened = ApiServer.from_kubeconfig(tmp_path / "kubeconfig", at_once=4)
    server.state.add_node("worker-1")
    together = threading.Barrier(4, timeout=20)

    server.state.before = together.wait  # each request waits for three others
    threads = [threading.Thread(target=opened.current, args=(NODE, "worker-1")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not together.broken
    opened.close()


@pytest.mark.parametrize(
    ("fault", "kind", "words", "retry_after"),
    [
        (Fault(status=404), Refused, "CustomResourceDefinition", None),
        (Fault(status=403), Refused, "permissions", None),
        (Fault(status=429, retry_after=7), Unavailable, "429", 7),
        (Fault(status=500), Unavailable, "500", None),
        (Fault(drop=True), Unavailable, "does not answer", None),
    ],
)
def test_a_failure_says_what_helps_is_not_repeated_and_leaves_the_client_usable(
    server: ApiServerStandIn, api: ApiServer, fault: Fault, kind: type[Unavailable], words: str, retry_after: int | None
) -> None:
    server.state.set_fault(fault)
    with pytest.raises(Unavailable, match=words) as caught:
        api.apply(KIND, TOPOLOGY, force=False)
    assert (type(caught.value), caught.value.retry_after) == (kind, retry_after)
    assert server.state.counts.failures == 1
    server.state.set_fault(None)
    api.apply(KIND, TOPOLOGY, force=False)


def test_without_dra_the_refusal_names_the_version_that_has_it(server: ApiServerStandIn, api: ApiServer) -> None:
    server.state.set_fault(Fault(status=404))
    with pytest.raises(Refused, match=r"Kubernetes 1\.34"):
        api.list_of(SLICE, {}, name_of)


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
            ApiServer.in_cluster(environ, account(tmp_path)).metadata(NODE, "worker-1")


def test_the_package_is_not_imported_before_a_client_is_opened() -> None:
    code = "import agent.cluster.apiserver, agent.cluster.publications, sys, json; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"kubernetes", "urllib3"} & set(json.loads(done.stdout))


def test_clients_opened_at_the_same_moment_all_find_the_whole_package(server: ApiServerStandIn, tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text(server.kubeconfig())
    code = f"""
import sys, threading
from pathlib import Path
from concurrent.futures import ThreadPoolExecutor
from agent.cluster.apiserver import ApiServer

sys.setswitchinterval(1e-6)
together = threading.Barrier(4)

def opened(number):
    together.wait()
    return ApiServer.from_kubeconfig(Path({str(tmp_path / "kubeconfig")!r}))

with ThreadPoolExecutor(4) as threads:
    assert len([*threads.map(opened, range(4))]) == 4
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def answer(data: bytes) -> HTTPResponse:
    return HTTPResponse(BytesIO(data), status=200, preload_content=False)


class Answering:
    """A client that hears one answer, whatever it asks."""

    def __init__(self, data: bytes) -> None:
        self.response = answer(data)

    def param_serialize(self, *request: Any, **how: Any) -> tuple[str, str, dict[str, str]]:
        return "GET", "http://x/", {}

    @property
    def rest_client(self) -> Answering:
        return self

    @property
    def pool_manager(self) -> Answering:
        return self

    def request(self, *request: Any, **how: Any) -> HTTPResponse:
        return self.response


def test_an_answer_without_end_is_refused() -> None:
    assert len(body_of(answer(bytes(MAX_ANSWER_BYTES)))) == MAX_ANSWER_BYTES
    with pytest.raises(Unavailable, match="is larger than"):
        body_of(answer(bytes(MAX_ANSWER_BYTES + 1)))


def test_no_more_than_one_pod_is_decoded_at_a_time() -> None:
    """Who may create pods could otherwise have the agent killed for its memory, and again after each start."""
    env = ",".join(f'{{"name":"A{number:05}"}}' for number in range(20_000))
    item = f'{{"metadata":{{"uid":"u"}},"spec":{{"containers":[{{"env":[{env}]}}]}},"status":{{}}}}'
    data = f'{{"metadata":{{"resourceVersion":"7"}},"items":[{",".join([item] * 10)}]}}'.encode()
    client = ApiServer(Answering(data))
    tracemalloc.start()
    try:
        assert client.list_of(POD, {}, lambda pod: pod["metadata"]["uid"]) == ("7", ["u"] * 10)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
