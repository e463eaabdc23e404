"""The stand-in for the API server over HTTP: applies, faults, schemas, who owns which field, and resource.k8s.io."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection, RemoteDisconnected
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hack.sim.cluster import field_sets
from hack.sim.cluster.apiserver import ApiServerStandIn, Counts, Fault
from hack.sim.cluster.dra import gates
from hack.sim.cluster.dra.rights import Caller
from hack.sim.cluster.field_sets import Managed, fields
from tests.sim.cluster.dra_documents import CLAIMS, SLICES, allocated, claim, device, resource_slice

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


values = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["x", "y"]), max_size=3)
documents = st.builds(lambda labels, spec: {"metadata": {"labels": labels}, "spec": spec}, values, values)


@given(st.lists(st.tuples(st.sampled_from(["one", "two", "three"]), documents), max_size=6))
def test_after_any_applies_each_field_of_the_content_has_an_owner(applies: list[tuple[str, dict[str, Any]]]) -> None:
    present: Managed | None = None
    for manager, document in applies:
        present = field_sets.apply(present, document, manager, force=True)
        found, wanted = fields(present.content), fields(document)
        assert {path: found[path] for path in wanted} == wanted
        assert found.keys() == frozenset().union(*present.owners.values())


JSON = "application/json"


@pytest.fixture
def server() -> Iterator[ApiServerStandIn]:
    with ApiServerStandIn() as running:
        yield running


def apply_at(server: ApiServerStandIn, path: str, document: Any) -> tuple[int, dict[str, Any]]:
    return call(server.port, "PATCH", f"{path}?fieldManager=driver&force=true", document)[:2]


def prepared(server: ApiServerStandIn, *results: dict[str, Any], node: str = "n") -> str:
    """Create a claim and allocate it, as the scheduler does; its path."""
    path = f"{CLAIMS}/c"
    assert call(server.port, "POST", CLAIMS, claim(), JSON)[0] == 201
    assert call(server.port, "PUT", f"{path}/status", allocated(*results, node=node), JSON)[0] == 200
    return path


def status_of(*devices: dict[str, Any], **more: Any) -> dict[str, Any]:
    head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c", "namespace": "ns"}}
    return {**head, "status": {"devices": list(devices)}, **more}


MINE = {"driver": "nodefabric.io", "pool": "n", "device": "vf-1"}
THEIRS = {"driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-0"}


def test_deletion_is_for_the_object_that_is_named_by_uid_and_version(server: ApiServerStandIn) -> None:
    stored = apply_at(server, f"{SLICES}/a", resource_slice("a"))[1]["metadata"]

    def delete(**preconditions: str) -> int:
        return call(server.port, "DELETE", f"{SLICES}/a", {"preconditions": preconditions}, JSON)[0]

    assert delete(uid="other") == 409
    assert delete(uid=stored["uid"], resourceVersion="1") == 409
    assert delete(uid=stored["uid"], resourceVersion=stored["resourceVersion"]) == 200
    assert delete(uid=stored["uid"]) == 404


def test_taints_without_a_time_get_that_of_the_write_so_that_a_repeat_is_a_change(server: ApiServerStandIn) -> None:
    tainted = resource_slice("a", devices=[device(taints=[{"key": "nodefabric.io/LinkDown", "effect": "NoSchedule"}])])
    server.state.now = lambda: "2026-01-01T00:00:00Z"
    first = apply_at(server, f"{SLICES}/a", tainted)[1]
    server.state.now = lambda: "2026-01-01T00:00:09Z"
    again = apply_at(server, f"{SLICES}/a", tainted)[1]
    times = [one["spec"]["devices"][0]["taints"][0]["timeAdded"] for one in (first, again)]
    assert times == ["2026-01-01T00:00:00Z", "2026-01-01T00:00:09Z"]
    assert again["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]
    server.state.now = lambda: "2026-01-01T00:00:20Z"
    kept = apply_at(server, f"{SLICES}/a", {**tainted, "spec": again["spec"]})[1]
    assert kept["metadata"]["resourceVersion"] == again["metadata"]["resourceVersion"]


def test_each_driver_tells_of_its_own_devices_and_leaves_the_others(server: ApiServerStandIn) -> None:
    path = prepared(server, MINE, THEIRS)
    theirs = {**THEIRS, "data": {"a": 1}}
    mine = {**MINE, "networkData": {"interfaceName": "net1", "ips": ["10.0.0.1/24"]}}
    assert call(server.port, "PATCH", f"{path}/status?fieldManager=gpu&force=true", status_of(theirs))[0] == 200
    status, found = apply_at(server, f"{path}/status", status_of(mine))
    assert (status, found["status"]["devices"]) == (200, [theirs, mine])
    assert len(found["status"]["allocation"]["devices"]["results"]) == 2
    assert apply_at(server, f"{path}/status", status_of())[1]["status"]["devices"] == [theirs]


HERE = ("driver", "associated-node:patch", "nodefabric.io")
ANYWHERE = ("driver", "arbitrary-node:patch", "nodefabric.io")


@pytest.mark.parametrize(
    ("right", "node", "status"),
    [
        (None, "n", 422),
        (HERE, "n", 200),
        (HERE, "m", 422),
        (ANYWHERE, "m", 200),
        (("driver", "associated-node:update", "nodefabric.io"), "n", 422),
        (("driver", "associated-node:patch", "gpu.nvidia.com"), "n", 422),
    ],
)
def test_devices_of_a_driver_are_written_by_who_has_the_right_for_it_and_the_node(
    server: ApiServerStandIn, right: tuple[str, str, str] | None, node: str, status: int
) -> None:
    path = prepared(server, MINE)
    server.state.caller = Caller(frozenset({right} if right else ()), node)
    assert apply_at(server, f"{path}/status", status_of(MINE))[0] == status
    server.state.gates -= {gates.GRANULAR}
    assert apply_at(server, f"{path}/status", status_of(MINE))[0] == 200
