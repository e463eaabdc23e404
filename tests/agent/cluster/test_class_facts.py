"""What doctor asks the API server, over real HTTP, against the stand-in."""

from __future__ import annotations

from agent.cluster.apiserver import ApiServer
from agent.cluster.claim_objects import cluster_facts
from agent.report.doctor.facts import DeviceClass
from hack.sim.cluster.apiserver import ApiServerStandIn, Fault

EXPRESSION = 'device.driver == "nodefabric.io"'


def test_kubelets_version_and_the_classes_are_told(server: ApiServerStandIn, api: ApiServer) -> None:
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "rdma-vf"},
        "spec": {"selectors": [{"cel": {"expression": EXPRESSION}}]},
    }
    server.state.write("DeviceClass", "rdma-vf", document, "somebody")
    bare = {**document, "metadata": {"name": "bare"}, "spec": {}}
    server.state.write("DeviceClass", "bare", bare, "somebody")
    found = cluster_facts(api, "n")
    assert (found.kubelet_version, found.problem) == ("v1.36.0", "")
    assert found.classes is not None
    assert sorted(found.classes, key=lambda one: one.name) == [
        DeviceClass("bare", ()),
        DeviceClass("rdma-vf", (EXPRESSION,)),
    ]


def test_without_the_right_to_list_classes_the_version_is_told_and_a_reason(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    server.state.set_fault(Fault(status=403, path="/apis/resource.k8s.io/v1/deviceclasses"))
    found = cluster_facts(api, "n")
    assert (found.kubelet_version, found.classes) == ("v1.36.0", None)
    assert "403" in found.problem or "refused" in found.problem
