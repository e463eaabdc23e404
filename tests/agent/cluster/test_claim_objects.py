"""What is read about a pod with claims, and for doctor, over real HTTP, against the stand-in for the API server."""

from __future__ import annotations

import pytest

from agent.cluster.apiserver import ApiServer
from agent.cluster.claim_objects import ClaimObjects, kubelet_version
from agent.errors import Refused, Unavailable
from agent.model.allocation import ClaimRef, PodRef
from hack.sim.cluster.apiserver import ApiServerStandIn, Fault
from tests.sim.cluster.dra_documents import allocated, resource_slice


def test_the_slices_are_those_of_a_driver_on_this_node(server: ApiServerStandIn, api: ApiServer) -> None:
    for name, driver, node in (("a", "gpu.example", "n"), ("b", "gpu.example", "m"), ("c", "nic.example", "n")):
        server.state.write("ResourceSlice", name, resource_slice(name, driver=driver, node=node), "a driver")

    assert [found["metadata"]["name"] for found in ClaimObjects(lambda: api, "n").slices("gpu.example")] == ["a"]


def test_a_claim_is_found_by_its_name_or_as_one_of_its_uid(server: ApiServerStandIn, api: ApiServer) -> None:
    document = allocated({"driver": "d.io", "pool": "n", "device": "x"})
    uid = server.state.write("ResourceClaim", "ns/c", document, "scheduler")["metadata"]["uid"]
    objects, reads = ClaimObjects(lambda: api, "n"), server.state.counts.reads
    found = objects.get(ClaimRef(uid, "ns", "c"))
    assert (found or {})["status"]["allocation"] == document["status"]["allocation"]
    assert server.state.counts.reads == reads + 1
    assert objects.claim("ns", "c") == found
    assert objects.claim("ns", "other") is None
    assert objects.get(ClaimRef("of-before", "ns", "c")) is None
    server.state.delete("ResourceClaim", "ns/c")
    assert objects.get(ClaimRef(uid, "ns", "c")) is None


def test_a_pod_of_another_uid_is_none(server: ApiServerStandIn, api: ApiServer) -> None:
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "ns"}, "spec": {}}
    uid = server.state.write("Pod", "ns/p", document, "somebody")["metadata"]["uid"]

    assert ClaimObjects(lambda: api, "n").pod(PodRef("ns", "p", uid)) is not None
    assert ClaimObjects(lambda: api, "n").pod(PodRef("ns", "p", "another")) is None
    assert ClaimObjects(lambda: api, "n").pod(PodRef("ns", "q", uid)) is None


@pytest.mark.parametrize(("status", "kind"), [(403, Refused), (500, Unavailable)])
def test_a_server_that_fails_or_refuses_is_no_answer(
    server: ApiServerStandIn, api: ApiServer, status: int, kind: type[Unavailable]
) -> None:
    server.state.set_fault(Fault(status=status))
    with pytest.raises(kind):
        ClaimObjects(lambda: api, "n").slices("gpu.example")
    with pytest.raises(kind):
        ClaimObjects(lambda: api, "n").get(ClaimRef("uid", "ns", "c"))


def test_kubelets_version_is_told_if_it_is_answered(server: ApiServerStandIn, api: ApiServer) -> None:
    assert kubelet_version(api, "n") == "v1.36.0"
    assert kubelet_version(api, "other") == ""
    server.state.set_fault(Fault(status=403))
    assert kubelet_version(api, "n") == ""
