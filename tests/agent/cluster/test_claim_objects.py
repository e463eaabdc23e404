"""What is read about a pod with claims, over real HTTP, against the stand-in for the API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cluster.apiserver import ApiServer
from agent.cluster.claims import ClaimObjects
from agent.errors import Unavailable
from agent.model.allocation import PodRef
from hack.sim.cluster.apiserver import ApiServerStandIn, Fault
from tests.sim.cluster.dra_documents import allocated, resource_slice


@pytest.fixture
def server() -> Iterator[ApiServerStandIn]:
    with ApiServerStandIn() as running:
        yield running


@pytest.fixture
def objects(server: ApiServerStandIn, tmp_path: Path) -> Iterator[ClaimObjects]:
    path = tmp_path / "kubeconfig"
    path.write_text(server.kubeconfig())
    api = ApiServer.from_kubeconfig(path)
    yield ClaimObjects(api, "n")
    api.close()


def test_the_slices_are_those_of_a_driver_on_this_node(server: ApiServerStandIn, objects: ClaimObjects) -> None:
    for name, driver, node in (("a", "gpu.example", "n"), ("b", "gpu.example", "m"), ("c", "nic.example", "n")):
        server.state.write("ResourceSlice", name, resource_slice(name, driver=driver, node=node), "a driver")

    assert [found["metadata"]["name"] for found in objects.slices("gpu.example")] == ["a"]


def test_a_claim_is_found_by_its_name(server: ApiServerStandIn, objects: ClaimObjects) -> None:
    server.state.write("ResourceClaim", "ns/c", allocated({"driver": "d.io", "pool": "n", "device": "x"}), "scheduler")

    assert (objects.claim("ns", "c") or {})["metadata"]["name"] == "c"
    assert objects.claim("ns", "other") is None


def test_a_pod_of_another_uid_is_none(server: ApiServerStandIn, objects: ClaimObjects) -> None:
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "ns"}, "spec": {}}
    uid = server.state.write("Pod", "ns/p", document, "somebody")["metadata"]["uid"]

    assert objects.pod(PodRef("ns", "p", uid)) is not None
    assert objects.pod(PodRef("ns", "p", "another")) is None
    assert objects.pod(PodRef("ns", "q", uid)) is None


def test_a_server_that_fails_is_no_answer(server: ApiServerStandIn, objects: ClaimObjects) -> None:
    server.state.set_fault(Fault(status=503))
    with pytest.raises(Unavailable):
        objects.slices("gpu.example")
