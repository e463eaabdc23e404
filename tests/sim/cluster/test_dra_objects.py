"""The objects of resource.k8s.io over HTTP: paths, parts, versions, rights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hack.sim.cluster.apiserver import ApiServerStandIn
from hack.sim.cluster.dra import gates
from hack.sim.cluster.dra.rights import Caller
from tests.sim.cluster.dra_documents import CLAIMS, SHARE, SLICES, allocated, claim, device, resource_slice
from tests.sim.cluster.test_apiserver import call

JSON = "application/json"


@pytest.fixture
def server() -> Iterator[ApiServerStandIn]:
    with ApiServerStandIn() as running:
        yield running


def apply(server: ApiServerStandIn, path: str, document: Any) -> tuple[int, dict[str, Any]]:
    return call(server.port, "PATCH", f"{path}?fieldManager=driver&force=true", document)[:2]


def names(server: ApiServerStandIn, selector: str) -> list[str]:
    found = call(server.port, "GET", f"{SLICES}?fieldSelector={selector}")[1]
    return [item["metadata"]["name"] for item in found["items"]]


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


def test_slices_are_listed_by_driver_and_node(server: ApiServerStandIn) -> None:
    for name, driver, node in (("a", "d.io", "n"), ("b", "d.io", "m"), ("c", "e.io", "n")):
        assert apply(server, f"{SLICES}/{name}", resource_slice(name, driver=driver, node=node))[0] == 201
    assert names(server, "spec.driver=d.io,spec.nodeName=n") == ["a"]
    assert names(server, "spec.nodeName=n") == ["a", "c"]
    status, refused, _ = call(server.port, "GET", f"{SLICES}?fieldSelector=spec.pool.name=n")
    assert (status, refused["message"]) == (400, "field label not supported: spec.pool.name")


def test_kubelets_wipe_takes_the_slices_of_its_node_alone_and_watchers_hear_of_each(server: ApiServerStandIn) -> None:
    for name, node in (("a", "n"), ("b", "n"), ("c", "m")):
        apply(server, f"{SLICES}/{name}", resource_slice(name, node=node))
    since = server.state.history.version
    assert call(server.port, "DELETE", f"{SLICES}?fieldSelector=spec.nodeName=n")[0] == 200
    assert names(server, "spec.nodeName=m") == ["c"]
    seen: list[Any] = []
    target = server.state.kinds.target(SLICES)
    assert target is not None
    server.state.history.watch(target, {"spec.nodeName": "n"}, since, (0, 1), seen.append)
    assert [(e["type"], e["object"]["metadata"]["name"]) for e in seen] == [("DELETED", "a"), ("DELETED", "b")]
    assert server.state.counts.deletes == 2


def test_deletion_is_for_the_object_that_is_named_by_uid_and_version(server: ApiServerStandIn) -> None:
    stored = apply(server, f"{SLICES}/a", resource_slice("a"))[1]["metadata"]

    def delete(**preconditions: str) -> int:
        return call(server.port, "DELETE", f"{SLICES}/a", {"preconditions": preconditions}, JSON)[0]

    assert delete(uid="other") == 409
    assert delete(uid=stored["uid"], resourceVersion="1") == 409
    assert delete(uid=stored["uid"], resourceVersion=stored["resourceVersion"]) == 200
    assert delete(uid=stored["uid"]) == 404


def test_taints_without_a_time_get_that_of_the_write_so_that_a_repeat_is_a_change(server: ApiServerStandIn) -> None:
    tainted = resource_slice("a", devices=[device(taints=[{"key": "nodefabric.io/LinkDown", "effect": "NoSchedule"}])])
    server.state.now = lambda: "2026-01-01T00:00:00Z"
    first = apply(server, f"{SLICES}/a", tainted)[1]
    server.state.now = lambda: "2026-01-01T00:00:09Z"
    again = apply(server, f"{SLICES}/a", tainted)[1]
    times = [one["spec"]["devices"][0]["taints"][0]["timeAdded"] for one in (first, again)]
    assert times == ["2026-01-01T00:00:00Z", "2026-01-01T00:00:09Z"]
    assert again["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]
    server.state.now = lambda: "2026-01-01T00:00:20Z"
    kept = apply(server, f"{SLICES}/a", {**tainted, "spec": again["spec"]})[1]
    assert kept["metadata"]["resourceVersion"] == again["metadata"]["resourceVersion"]


def test_a_list_attribute_whose_gate_is_off_leaves_nothing_and_is_refused(server: ApiServerStandIn) -> None:
    listed = resource_slice("a", devices=[device(attributes={"gpu.nvidia.com/uuid": {"strings": ["GPU-1", "GPU-2"]}})])
    status, refused = apply(server, f"{SLICES}/a", listed)
    assert status == 422
    assert refused["message"] == (
        'ResourceSlice.resource.k8s.io "a" is invalid: spec.devices[0].attributes[gpu.nvidia.com/uuid]: '
        'Invalid value: "": exactly one value must be specified'
    )
    server.state.gates |= {gates.LISTS}
    assert apply(server, f"{SLICES}/a", listed)[0] == 201


def test_a_slice_may_not_be_given_to_another_driver_node_or_pool(server: ApiServerStandIn) -> None:
    apply(server, f"{SLICES}/a", resource_slice("a", driver="d.io", node="n"))
    status, refused = apply(server, f"{SLICES}/a", resource_slice("a", driver="e.io", node="m"))
    assert status == 422
    for text in (
        'spec.pool.name: Invalid value: "m": field is immutable',
        'spec.driver: Invalid value: "e.io": field is immutable',
        'spec.nodeName: Invalid value: "m": field is immutable',
    ):
        assert text in refused["message"]


def test_the_status_of_a_claim_is_written_by_its_own_path_only(server: ApiServerStandIn) -> None:
    status, created, _ = call(server.port, "POST", CLAIMS, {**claim(), "status": {"reservedFor": []}}, JSON)
    assert (status, created.get("status")) == (201, None)
    changed = {**allocated(MINE), "spec": {"devices": {"requests": []}}}
    status, written, _ = call(server.port, "PUT", f"{CLAIMS}/c/status", changed, JSON)
    assert (status, written["spec"]) == (200, created["spec"])
    assert written["status"]["allocation"]["devices"]["results"][0]["device"] == "vf-1"
    assert call(server.port, "PUT", f"{CLAIMS}/c", changed, JSON)[0] == 422  # its spec is immutable


def test_a_claim_has_a_name_of_its_own_in_each_namespace_or_a_generated_one(server: ApiServerStandIn) -> None:
    other = CLAIMS.replace("/ns/", "/other/")
    for path, document in ((CLAIMS, claim()), (other, claim(namespace="other"))):
        assert call(server.port, "POST", path, document, JSON)[0] == 201
    assert call(server.port, "POST", CLAIMS, claim(), JSON)[0] == 409
    generated = claim()
    generated["metadata"] = {"generateName": "pod-nic-", "namespace": "ns"}
    name = call(server.port, "POST", CLAIMS, generated, JSON)[1]["metadata"]["name"]
    assert name.startswith("pod-nic-")
    assert len(name) == len("pod-nic-") + 5
    everywhere = call(server.port, "GET", CLAIMS.replace("/namespaces/ns", ""))[1]["items"]
    assert len(everywhere) == 3
    assert len(call(server.port, "GET", CLAIMS)[1]["items"]) == 2


def test_an_allocation_stays_as_it_is_once_it_is_made(server: ApiServerStandIn) -> None:
    path = prepared(server, MINE)
    status, refused, _ = call(server.port, "PUT", f"{path}/status", allocated({**MINE, "device": "vf-2"}), JSON)
    assert status == 422
    assert "status.allocation: Invalid value" in refused["message"]
    assert refused["message"].endswith("field is immutable")
    # It may be taken away, and with it goes what is reserved.
    gone = {**claim(), "status": {}}
    assert call(server.port, "PUT", f"{path}/status", gone, JSON)[0] == 200


def test_each_driver_tells_of_its_own_devices_and_leaves_the_others(server: ApiServerStandIn) -> None:
    path = prepared(server, MINE, THEIRS)
    theirs = {**THEIRS, "data": {"a": 1}}
    mine = {**MINE, "networkData": {"interfaceName": "net1", "ips": ["10.0.0.1/24"]}}
    assert call(server.port, "PATCH", f"{path}/status?fieldManager=gpu&force=true", status_of(theirs))[0] == 200
    status, found = apply(server, f"{path}/status", status_of(mine))
    assert (status, found["status"]["devices"]) == (200, [theirs, mine])
    assert len(found["status"]["allocation"]["devices"]["results"]) == 2
    assert apply(server, f"{path}/status", status_of())[1]["status"]["devices"] == [theirs]


def test_a_device_in_a_status_must_be_one_that_is_allocated_share_and_all(server: ApiServerStandIn) -> None:
    path = prepared(server, {**MINE, "shareID": SHARE})
    status, refused = apply(server, f"{path}/status", status_of(MINE))
    assert status == 422
    assert refused["message"].endswith(
        'status.devices[0]: Invalid value: "nodefabric.io/n/vf-1": must be an allocated device in the claim'
    )
    assert apply(server, f"{path}/status", status_of({**MINE, "shareID": SHARE}))[0] == 200


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
    assert apply(server, f"{path}/status", status_of(MINE))[0] == status
    server.state.gates -= {gates.GRANULAR}
    assert apply(server, f"{path}/status", status_of(MINE))[0] == 200


def test_who_may_not_bind_changes_no_allocation(server: ApiServerStandIn) -> None:
    call(server.port, "POST", CLAIMS, claim(), JSON)
    server.state.caller = Caller(frozenset({HERE}), "n")
    assert call(server.port, "PUT", f"{CLAIMS}/c/status", allocated(MINE), JSON)[0] == 422
    server.state.caller = Caller(frozenset({("binding", "update", "")}))
    assert call(server.port, "PUT", f"{CLAIMS}/c/status", allocated(MINE), JSON)[0] == 200
