"""What the policy for claims lets an agent write of slices and claims' status, each expression evaluated by CEL."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.cluster.claim_objects import AttachedDevice
from deviceplugin.dra.devices import slices_of
from tests.daemonset.admission import Policy, Request
from tests.daemonset.manifests import SWITCHES, Document, Kube, named, overlay
from tests.deviceplugin.dra.nodes import HCA, VF, Offered, recorded_node

NODE, OTHER = "gpu-7", "gpu-8"
DRIVER = "nodefabric.io"
ACCOUNT = "system:serviceaccount:nodefabric:nodefabric"
EXTRA = {"authentication.kubernetes.io/node-name": [NODE]}
ELSEWHERE = {"authentication.kubernetes.io/node-name": [OTHER]}


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
    return Request(operation, "resource.k8s.io", "v1", "resourceslices", ACCOUNT, EXTRA, new, old)


def on_status(new: Document, old: Document) -> Request:
    return Request("UPDATE", "resource.k8s.io", "v1", "resourceclaims", ACCOUNT, EXTRA, new, old, "status")


@pytest.fixture(params=["helm", "kustomize"], scope="module")
def policy(kube: Kube, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    if request.param == "helm":
        return policy_in(kube.template(SWITCHES["dra"]))
    return policy_in(kube.kustomize(overlay(tmp_path_factory.mktemp("dra"), "dra")))


def policy_in(found: list[Document]) -> Policy:
    (document,) = [
        d
        for d in found
        if d["kind"] == "ValidatingAdmissionPolicy" and d["metadata"]["name"] == "nodefabric-own-devices"
    ]
    return Policy(document)


def messages(policy: Policy, request: Request) -> list[str]:
    denials = policy.denials(request)
    assert denials is not None, "the policy does not look at this"
    return [denial.message for denial in denials]


WRITES = {
    "create": on_slices("CREATE", resource_slice()),
    "update": on_slices("UPDATE", resource_slice(), resource_slice()),
    "delete": on_slices("DELETE", None, resource_slice()),
    "first status": on_status(claim(device()), claim()),
    "later status": on_status(claim(device(data={"network": "rails"})), claim(device())),
    "status taken back": on_status(claim(), claim(device())),
}


@pytest.mark.parametrize("kind", ["ResourceSlice", "ResourceClaim"])
def test_the_api_server_has_nothing_to_warn_of(policy: Policy, kind: str) -> None:
    assert policy.warnings(kind) == ()


@pytest.mark.parametrize("write", WRITES)
def test_an_agent_writes_what_is_of_its_own_node(policy: Policy, write: str) -> None:
    assert policy.denials(WRITES[write]) == ()


def test_an_agent_publishes_what_it_makes_of_its_node(policy: Policy) -> None:
    offered = Offered(recorded_node("h100-8gpu"), (VF, HCA))
    documents = slices_of(offered.devices, DRIVER, NODE)
    assert len(documents) > 1
    for document in documents:
        assert policy.denials(on_slices("CREATE", dict(document))) == ()
        assert policy.denials(replace(on_slices("CREATE", dict(document)), extra=ELSEWHERE)) != ()


def test_an_agent_writes_the_status_that_it_makes_of_an_attached_device(policy: Policy) -> None:
    attached = AttachedDevice(DRIVER, NODE, "vf-0000-18-00-1", 0.0, interface="rdma0", addresses=("192.0.2.1/24",))
    assert policy.denials(on_status(claim(attached.status()), claim())) == ()


@pytest.mark.parametrize("write", WRITES)
def test_an_agent_writes_nothing_of_another_node(policy: Policy, write: str) -> None:
    (told,) = messages(policy, replace(WRITES[write], extra=ELSEWHERE))
    assert told.startswith(f"the agent of node {OTHER} may not write ")


@pytest.mark.parametrize("extra", [{}, {"authentication.kubernetes.io/node-name": [""]}])
@pytest.mark.parametrize("write", WRITES)
def test_a_token_that_names_no_node_writes_nothing(policy: Policy, write: str, extra: dict[str, list[str]]) -> None:
    assert messages(policy, replace(WRITES[write], extra=extra)) == [
        "the token names no node; it must be that of a pod, and ServiceAccountTokenPodNodeInfo be on"
    ]


@pytest.mark.parametrize("username", [f"system:node:{NODE}", "system:serviceaccount:gpu:nvidia", "kube-scheduler"])
def test_others_are_none_of_its_business(policy: Policy, username: str) -> None:
    for request in WRITES.values():
        assert policy.denials(replace(request, username=username, extra={})) is None


def test_a_slice_of_its_own_is_not_put_into_the_pool_of_another_node(policy: Policy) -> None:
    """With a newer generation there the other node's devices would count no more."""
    told = messages(policy, on_slices("CREATE", resource_slice(pool=OTHER)))
    assert told == [f"the agent of node {NODE} may not write slices of (node/pool) {NODE}/{OTHER}"]
    moved = on_slices("UPDATE", resource_slice(pool=OTHER), resource_slice())
    assert len(messages(policy, moved)) == 1


def of_all_nodes() -> Document:
    found = resource_slice()
    del found["spec"]["nodeName"]
    found["spec"]["allNodes"] = True
    return found


def test_a_slice_for_all_nodes_is_of_no_node(policy: Policy) -> None:
    for request in (
        on_slices("CREATE", of_all_nodes()),
        on_slices("DELETE", None, of_all_nodes()),
        on_slices("UPDATE", of_all_nodes(), resource_slice()),
        on_slices("UPDATE", resource_slice(), of_all_nodes()),
    ):
        assert len(messages(policy, request)) == 1


def test_slices_of_other_drivers_are_theirs(policy: Policy) -> None:
    other = resource_slice(driver="gpu.nvidia.com")
    for request in (
        on_slices("CREATE", other),
        on_slices("DELETE", None, other),
        on_slices("UPDATE", other, resource_slice()),
        on_slices("UPDATE", resource_slice(), other),
    ):
        assert messages(policy, request) == [f"the agent may not write slices of drivers other than {DRIVER}"]


def test_the_driver_is_the_configured_one(kube: Kube) -> None:
    values = copy.deepcopy(SWITCHES["dra"])
    values["config"]["dra"] = {"driver": "dra.example.com"}
    policy = policy_in(kube.template(values))
    assert policy.denials(on_slices("CREATE", resource_slice(driver="dra.example.com"))) == ()
    assert policy.denials(WRITES["create"]) != ()


def allocated_elsewhere(old: Document) -> None:
    selector = old["status"]["allocation"]["nodeSelector"]
    selector["nodeSelectorTerms"][0]["matchFields"][0]["values"] = [OTHER]


def not_allocated(old: Document) -> None:
    del old["status"]["allocation"]


def everywhere(old: Document) -> None:
    del old["status"]["allocation"]["nodeSelector"]


def without_status(old: Document) -> None:
    del old["status"]


@pytest.mark.parametrize(
    ("change", "where"),
    [(allocated_elsewhere, OTHER), (not_allocated, "no node"), (everywhere, "no node"), (without_status, "no node")],
)
def test_the_status_of_a_claim_is_for_the_agent_of_its_node(
    policy: Policy, change: Callable[[Document], None], where: str
) -> None:
    old, new = claim(), claim(device())
    change(old)
    told = f"the agent of node {NODE} may not write the status of a claim that is allocated to {where}"
    assert told in messages(policy, on_status(new, old))


def other_pod(status: Document) -> None:
    status["reservedFor"].append({"resource": "pods", "name": "q", "uid": "2"})


def nobody(status: Document) -> None:
    del status["reservedFor"]


def other_device(status: Document) -> None:
    status["allocation"]["devices"]["results"][0]["device"] = "vf-0000-18-00-2"


def freed(status: Document) -> None:
    del status["allocation"]


@pytest.mark.parametrize("change", [other_pod, nobody, other_device, freed])
def test_of_a_claim_the_allocation_and_its_pods_stay_as_they_are(
    policy: Policy, change: Callable[[Document], None]
) -> None:
    new = claim(device())
    change(new["status"])
    assert messages(policy, on_status(new, claim())) == ["of a claim's status the agent may change the devices alone"]


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ([device("gpu.nvidia.com")], []),
        ([], [device("gpu.nvidia.com")]),
        ([device("gpu.nvidia.com", data={}), device()], [device("gpu.nvidia.com")]),
    ],
)
def test_what_other_drivers_say_of_their_devices_stays(
    policy: Policy, new: list[Document], old: list[Document]
) -> None:
    told = messages(policy, on_status(claim(*new), claim(*old)))
    assert told == ["the agent may not change what other drivers say of a claim's devices"]


def test_beside_other_drivers_devices_an_agent_says_of_its_own(policy: Policy) -> None:
    gpu = device("gpu.nvidia.com")
    assert policy.denials(on_status(claim(device(), gpu), claim(gpu))) == ()
    assert policy.denials(on_status(claim(gpu), claim(gpu, device()))) == ()


def test_what_it_does_not_look_at_is_for_the_role_to_refuse(policy: Policy) -> None:
    foreign = replace(WRITES["first status"], extra=ELSEWHERE)
    for unseen in (
        replace(foreign, subresource=""),
        replace(foreign, subresource="binding"),
        replace(foreign, operation="CREATE"),
        replace(WRITES["create"], resource="deviceclasses"),
    ):
        assert policy.denials(unseen) is None


def test_without_claims_there_is_no_such_policy_and_no_class(kube: Kube, tmp_path: Path) -> None:
    for found in (kube.template(), kube.kustomize(overlay(tmp_path / "overlay"))):
        assert [d["metadata"]["name"] for d in found if d["kind"] == "ValidatingAdmissionPolicy"] == [
            "nodefabric-own-node"
        ]
        assert not [d for d in found if d["apiVersion"].startswith("resource.k8s.io/")]


def test_what_removes_the_agent_takes_the_slices_of_its_own_node_away(kube: Kube) -> None:
    found = kube.template({**SWITCHES["dra"], "remove": True})
    policy = policy_in(found)
    removing = replace(WRITES["delete"], username=f"{ACCOUNT}-remove")
    assert policy.denials(removing) == ()
    assert len(messages(policy, replace(removing, extra=ELSEWHERE))) == 1
    other = on_slices("DELETE", None, resource_slice(driver="gpu.nvidia.com"))
    assert len(messages(policy, replace(other, username=f"{ACCOUNT}-remove"))) == 1
    (role,) = [d for d in found if d["kind"] == "ClusterRole"]
    assert [(rule["resources"], rule["verbs"]) for rule in role["rules"]] == [(["resourceslices"], ["list", "delete"])]


def test_who_wants_no_policy_has_none(kube: Kube) -> None:
    found = kube.template({**SWITCHES["dra"], "admissionPolicy": {"enabled": False}})
    assert not [d for d in found if d["kind"].startswith("ValidatingAdmissionPolicy")]
    assert named(found, "ClusterRole")["rules"]
