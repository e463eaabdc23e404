"""What the admission policies let an agent write, and what they refuse: each expression evaluated by a CEL runtime."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.cluster.apiserver import ApiServer
from agent.cluster.claim_objects import entry
from agent.cluster.node_events import NodeEvents
from agent.cluster.node_taint import KEY
from agent.model.allocation import Hold, NetworkData
from agent.offer.offer import Offer
from agent.process.conditions import Conditions
from agent.state import Latest
from deviceplugin.dra.devices import slices_of
from tests.daemonset.admission import Policy, Request
from tests.daemonset.manifests import REPOSITORY, SWITCHES, Document, Kube, overlay
from tests.deviceplugin.dra.nodes import HCA, VF, Offered, recorded_node

NODE, OTHER = "gpu-7", "gpu-8"
OBJECTS = REPOSITORY / "tests/agent/cluster/topology/objects"
ACCOUNT = "system:serviceaccount:nodefabric:nodefabric"
CLAIM = "authentication.kubernetes.io/node-name"


def published(name: str) -> Document:
    """An object as the publisher makes it."""
    document: Document = json.loads((OBJECTS / f"{name}.json").read_text())
    assert document["metadata"]["name"] == NODE
    return document


def own_event() -> Document:
    """An event as the agent sends it."""

    async def first() -> Document:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Document] = loop.create_future()

        class Api(ApiServer):
            def create(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
                loop.call_soon_threadsafe(told.set_result, dict(document))
                return {}

        conditions = Conditions()
        conditions.set("config", "a new error")
        running = asyncio.ensure_future(NodeEvents(Api(None), NODE, Latest(Offer()), conditions).run())
        try:
            async with asyncio.timeout(60):
                return await told
        finally:
            running.cancel()

    return asyncio.run(first())


def node(name: str = NODE, **metadata: Any) -> Document:
    taint = {"key": "example.com/maintenance", "effect": "NoSchedule"}
    plain = {"name": name, "labels": {"kubernetes.io/hostname": name}, "annotations": {"a": "1"}}
    return {"metadata": {**plain, **metadata}, "spec": {"taints": [taint], "podCIDR": "10.0.0.0/24"}, "status": {}}


def create(group: str, version: str, resource: str, document: Document) -> Request:
    return Request("CREATE", group, version, resource, ACCOUNT, {CLAIM: [NODE]}, document)


def update(changed: Document, old: Document | None = None) -> Request:
    return Request("UPDATE", "", "v1", "nodes", ACCOUNT, {CLAIM: [NODE]}, changed, old or node())


TOPOLOGY = create("topology.node.k8s.io", "v1alpha2", "noderesourcetopologies", published("noderesourcetopology"))
VOLCANO = create("nodeinfo.volcano.sh", "v1alpha1", "numatopologies", published("numatopology"))
EVENT = create("", "v1", "events", own_event())
LABELS = update(
    node(
        labels={"kubernetes.io/hostname": NODE, "example.com/rails": "8"},
        annotations={"a": "1", "example.com/load": "{}"},
    )
)
CONFIG: Document = {
    "publish": True,
    "volcano": True,
    "labels": {
        "keys": {
            "example.com/rails": "rails",
            "plain.example/leaf.{nic}": "leaf-switch",
            "plain.example/rail.{rail}-{plane}": "leaf-switch",
        }
    },
    "bandwidth": {"annotation": "example.com/load"},
}
WRITES = {
    "topology": TOPOLOGY,
    "volcano": VOLCANO,
    "event": EVENT,
    "labels": LABELS,
    "topology again": replace(TOPOLOGY, operation="UPDATE", old_object=TOPOLOGY.object),
    "volcano again": replace(VOLCANO, operation="UPDATE", old_object=VOLCANO.object),
}

# ---------------------------------------------------------------------------------------------------------- of claims

DRIVER = "nodefabric.io"
OWN_NODE, OWN_DEVICES = "nodefabric-own-node", "nodefabric-own-devices"


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
    return Request(operation, "resource.k8s.io", "v1", "resourceslices", ACCOUNT, {CLAIM: [NODE]}, new, old)


def on_status(new: Document, old: Document) -> Request:
    return Request("UPDATE", "resource.k8s.io", "v1", "resourceclaims", ACCOUNT, {CLAIM: [NODE]}, new, old, "status")


WRITES_OF_CLAIMS = {
    "create": on_slices("CREATE", resource_slice()),
    "update": on_slices("UPDATE", resource_slice(), resource_slice()),
    "delete": on_slices("DELETE", None, resource_slice()),
    "first status": on_status(claim(device()), claim()),
    "later status": on_status(claim(device(data={"network": "rails"})), claim(device())),
    "status taken back": on_status(claim(), claim(device())),
}


def policy_in(found: list[Document], name: str = OWN_NODE) -> Policy:
    of_kind = [d for d in found if d["kind"] == "ValidatingAdmissionPolicy"]
    (document,) = [d for d in of_kind if d["metadata"]["name"].endswith(name.removeprefix("nodefabric"))]
    return Policy(document)


def messages(policy: Policy, request: Request) -> list[str]:
    denials = policy.denials(request)
    assert denials is not None, "the policy does not look at this"
    return [denial.message for denial in denials]


Pair = tuple[Policy, Request]


@pytest.fixture(scope="module")
def policy(kube: Kube) -> Policy:
    """The one of the Node and its objects, as it is installed with CONFIG."""
    return policy_in(kube.template({"config": {"topology": CONFIG}}))


@pytest.fixture(scope="module")
def tainting(kube: Kube) -> Policy:
    """The same where agents taint their Nodes while they restart."""
    return policy_in(kube.template(SWITCHES["restart"]))


@pytest.fixture(scope="module")
def claims(kube: Kube) -> Policy:
    return policy_in(kube.template(SWITCHES["dra"]), OWN_DEVICES)


@pytest.fixture(params=[*WRITES, *WRITES_OF_CLAIMS, "topology where agents taint", "event where agents taint"])
def written(policy: Policy, claims: Policy, tainting: Policy, request: pytest.FixtureRequest) -> Pair:
    """A write of an agent's, and the policy that looks at it."""
    name, taints, _ = request.param.partition(" where")
    if name in WRITES_OF_CLAIMS:
        return claims, WRITES_OF_CLAIMS[name]
    return tainting if taints else policy, WRITES[name]


def elsewhere(request: Request) -> Request:
    """Have the agent of another node ask for it."""
    return replace(request, extra={CLAIM: [OTHER]})


# ---------------------------------------------------------------------------------------------------- of which node


def test_an_agent_writes_of_its_own_node_and_of_no_other(written: Pair) -> None:
    policy, write = written
    assert policy.denials(write) == ()
    denials = policy.denials(elsewhere(write))
    assert denials is not None
    assert [denial.reason for denial in denials] == ["Forbidden"]
    assert denials[0].message.startswith(f"the agent of node {OTHER} may not write ")


@pytest.mark.parametrize("extra", [{}, {CLAIM: []}, {CLAIM: [""]}, {"authentication.kubernetes.io/pod-name": ["p"]}])
def test_a_token_that_names_no_node_writes_nothing(written: Pair, extra: dict[str, list[str]]) -> None:
    policy, write = written
    assert messages(policy, replace(write, extra=extra)) == [
        "the token names no node; it must be that of a pod, and ServiceAccountTokenPodNodeInfo be on"
    ]


@pytest.mark.parametrize("name", ["nodefabric:default", "nodefabric:other-nodefabric", "tenant:nodefabric"])
def test_the_policies_are_for_the_agents_account_alone(written: Pair, name: str) -> None:
    policy, write = written
    for username in (f"system:serviceaccount:{name}", f"system:node:{NODE}", "nodefabric"):
        assert policy.denials(replace(write, username=username, extra={})) is None


@pytest.mark.parametrize(("release", "namespace"), [("nodefabric", "rdma"), ("fabric", "nodefabric")])
def test_the_account_is_that_of_the_release(kube: Kube, release: str, namespace: str) -> None:
    values = {"config": {"topology": CONFIG}}
    policy = policy_in(kube.template(values, namespace=namespace, release=release))
    write = replace(TOPOLOGY, username=f"system:serviceaccount:{namespace}:{release}")
    assert policy.denials(write) == ()
    assert policy.denials(elsewhere(write)) != ()
    assert policy.denials(elsewhere(TOPOLOGY)) is None


def test_what_they_do_not_look_at_is_for_the_role_to_refuse(policy: Policy, claims: Policy) -> None:
    """`test_rights.py` holds that the role lets an agent do nothing of this."""
    node_of, status_of = elsewhere(LABELS), elsewhere(WRITES_OF_CLAIMS["first status"])
    for looking, unseen in (
        (policy, replace(node_of, operation="DELETE", old_object=node_of.object, object=None)),
        (policy, replace(node_of, subresource="status")),
        (policy, replace(node_of, operation="CREATE")),
        (policy, replace(node_of, resource="pods")),
        (policy, replace(node_of, group="example.com")),
        (policy, replace(EVENT, operation="UPDATE", extra={})),
        (claims, replace(status_of, subresource="")),
        (claims, replace(status_of, subresource="binding")),
        (claims, replace(status_of, operation="CREATE")),
        (claims, replace(WRITES_OF_CLAIMS["create"], resource="deviceclasses")),
    ):
        assert looking.denials(unseen) is None


# ------------------------------------------------------------------------------------------------ Nodes and objects

OF_SPEC = "the agent may not change the spec of a Node"
OF_TAINTS = "the agent may not change the taints of a Node, but for the one of restart.taint"
OF_OWNERS = "the agent may not change the finalizers and owners of a Node"
MINE = {"key": KEY, "effect": "NoSchedule"}
OTHERS = {"key": "example.com/maintenance", "effect": "NoSchedule"}


def changed(request: Request, path: str, value: object) -> Request:
    """Change the object of a request; None takes the field away."""
    document = copy.deepcopy(request.object)
    *parents, last = path.split(".")
    place: Any = document
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return replace(request, object=document)


def with_spec(**said: object) -> Document:
    found = node()
    return found | {"spec": found["spec"] | said}


def with_taints(*taints: Document) -> Document:
    found = with_spec(taints=list(taints))
    if not taints:
        del found["spec"]["taints"]
    return found


@pytest.mark.parametrize(
    ("path", "value", "about"),
    [
        ("involvedObject.name", OTHER, f"Node/{OTHER}"),
        ("involvedObject.kind", "Pod", f"Pod/{NODE}"),
        ("involvedObject.name", f"{NODE}/x", f"Node/{NODE}/x"),
    ],
)
def test_an_event_is_about_the_own_node(policy: Policy, path: str, value: str, about: str) -> None:
    assert messages(policy, changed(EVENT, path, value)) == [f"the agent of node {NODE} may not write of {about}"]


@pytest.mark.parametrize(
    ("write", "path"),
    [("event", "involvedObject"), ("event", "involvedObject.name"), ("topology", "metadata.name"), ("labels", "spec")],
)
def test_what_lacks_what_is_asked_for_is_refused(policy: Policy, write: str, path: str) -> None:
    without = changed(WRITES[write], path, None)
    if path == "metadata.name":
        without = changed(without, "metadata.generateName", NODE)
    (message, *_) = messages(policy, without)
    assert "resulted in error" in message


@pytest.mark.parametrize(
    ("new", "told"),
    [
        (with_spec(), []),
        *(
            (with_spec(**{key: value}), [OF_SPEC])
            for key, value in (("unschedulable", True), ("podCIDR", "10.0.1.0/24"))
        ),
        (with_spec(podCIDRs=[], providerID="aws:///x"), [OF_SPEC]),
        (node(finalizers=[{"uid": "1"}]), [OF_OWNERS]),
        (node(ownerReferences=[{"uid": "1"}]), [OF_OWNERS]),
    ],
)
def test_of_a_node_spec_finalizers_and_owners_stay(
    policy: Policy, tainting: Policy, new: Document, told: list[str]
) -> None:
    for looking in (policy, tainting):
        assert messages(looking, update(new, node())) == messages(looking, update(node(), new)) == told
        assert looking.denials(update(new, new)) == ()


@pytest.mark.parametrize(
    ("old", "new", "may"),
    [
        ([OTHERS], [OTHERS, MINE], True),
        ([OTHERS, MINE], [OTHERS], True),
        ([], [MINE], True),
        ([MINE], [], True),
        ([{**MINE, "effect": "NoExecute"}, OTHERS], [OTHERS, MINE], True),
        ([OTHERS], [], False),
        ([OTHERS], [MINE], False),
        ([OTHERS], [OTHERS, {**OTHERS, "key": "example.com/x"}], False),
        ([OTHERS], [{**OTHERS, "effect": "PreferNoSchedule"}], False),
        ([], [{**MINE, "effect": "NoExecute"}], False),
        ([MINE], [MINE, {**MINE, "effect": "NoExecute"}], False),
        ([], [{**MINE, "key": f"{KEY}-too"}], False),
    ],
)
def test_an_agent_that_taints_its_node_changes_the_one_taint_that_is_its_own(
    tainting: Policy, policy: Policy, old: list[Document], new: list[Document], may: bool
) -> None:
    request = update(with_taints(*new), with_taints(*old))
    assert messages(tainting, request) == ([] if may else [OF_TAINTS])
    assert messages(policy, request) == [OF_TAINTS]
    assert policy.denials(update(with_taints(*old), with_taints(*old))) == ()
    assert messages(tainting, elsewhere(request)) != []


# ------------------------------------------------------------------------------------------- labels and annotations

OWN = (
    *("example.com/rails", "plain.example/leaf.0000-3b-00.0", "plain.example/leaf.10000-3b-1f.7"),
    "plain.example/rail.12-1",
)
FOREIGN = (
    *("kubernetes.io/hostname", "topology.kubernetes.io/zone", "node.k8s.io/x", "feature.node.kubernetes.io/rdma"),
    *("example.com/rails2", "example-com/rails", "plain.example/leaf.", "plain.example/leaf.0000-3b-00.0.1", "pool"),
    *("plain.example/rail.12-", "plain.example/rail.{rail}-{plane}"),
)
NAMED = {
    "labels": "labels but those of topology.labels",
    "annotations": "annotations but that of topology.bandwidth.annotation",
}
RESTRICTED = "the agent may not change labels of node-role.kubernetes.io and node-restriction.kubernetes.io"


def with_(what: str, values: dict[str, str]) -> Document:
    """Return the Node with these labels or annotations in place of its own."""
    document = node()
    document["metadata"][what] = values
    return document


@pytest.mark.parametrize("what", ["labels", "annotations"])
@pytest.mark.parametrize("key", [*OWN, "example.com/load", *FOREIGN])
def test_of_labels_and_annotations_it_sets_those_of_its_configuration(policy: Policy, what: str, key: str) -> None:
    own = OWN if what == "labels" else ("example.com/load",)
    refused = [f"the agent may change no {NAMED[what]}: {key}"]
    none, one, two, bare = (with_(what, values) for values in ({}, {key: "1"}, {key: "2"}, {}))
    del bare["metadata"][what]
    for new, old in ((one, none), (two, one), (one, bare)):
        assert messages(policy, update(new, old)) == ([] if key in own else refused)
    # What has left the configuration is taken back; nobody takes away what is Kubernetes' own.
    taken = refused if "kubernetes.io" in key or "k8s.io" in key else []
    for new, old in ((none, one), (bare, one)):
        assert messages(policy, update(new, old)) == taken
    for same in (none, one, bare):
        assert policy.denials(update(same, same)) == ()


def test_without_labels_in_the_configuration_it_sets_none(kube: Kube) -> None:
    policy = policy_in(kube.template())
    assert messages(policy, LABELS) == [
        f"the agent may change no {NAMED['labels']}: example.com/rails",
        f"the agent may change no {NAMED['annotations']}: example.com/load",
    ]


def test_by_kustomize_the_keys_are_patched_into_the_policy(kube: Kube, tmp_path: Path) -> None:
    """As docs/install.md tells."""
    folder = overlay(tmp_path / "overlay", "labels")
    text = (REPOSITORY / "docs/install.md").read_text()
    (patch,) = re.findall(r"^```yaml\n(patches:\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    with (folder / "kustomization.yaml").open("a") as file:
        file.write(patch)
    policy = policy_in(kube.kustomize(folder))
    assert policy.denials(update(with_("labels", {"nodefabric.io/rails": "8"}), with_("labels", {}))) == ()
    assert policy.denials(update(with_("labels", {"example.com/rails": "8"}), with_("labels", {}))) != ()


@pytest.mark.parametrize("domain", ["node-restriction", "team.node-restriction", "node-role"])
def test_labels_that_others_trust_stay_whatever_the_configuration_says(kube: Kube, domain: str) -> None:
    key = f"{domain}.kubernetes.io/zone"
    policy = policy_in(kube.template({"config": {"topology": {**CONFIG, "labels": {"keys": {key: "rails"}}}}}))
    none, empty, one, two = (with_("labels", {"a": "b", **more}) for more in ({}, {key: ""}, {key: "1"}, {key: "2"}))
    for new, old in ((one, none), (two, one), (none, one), (empty, none), (none, empty)):
        assert messages(policy, update(new, old)) == [RESTRICTED]
    for same in (none, empty, one):
        assert policy.denials(update(same, same)) == ()


# ------------------------------------------------------------------------------------------------ slices and claims

OF_POOL = f"the agent of node {NODE} may not write slices of (node/pool) "
OF_DRIVERS = f"the agent may not write slices of drivers other than {DRIVER}"
OF_DEVICES = "of a claim's status the agent may change the devices alone"
OF_OTHER_DEVICES = "the agent may not change what other drivers say of a claim's devices"


def for_all_nodes() -> Document:
    found = resource_slice()
    del found["spec"]["nodeName"]
    found["spec"]["allNodes"] = True
    return found


def each_way(strange: Document) -> Iterator[Request]:
    """List the writes of a slice, and those that make it of one of its own or the other way round."""
    yield on_slices("CREATE", strange)
    yield on_slices("DELETE", None, strange)
    yield on_slices("UPDATE", strange, resource_slice())
    yield on_slices("UPDATE", resource_slice(), strange)


@pytest.mark.parametrize(
    ("strange", "told"),
    [
        (resource_slice(driver="gpu.nvidia.com"), OF_DRIVERS),
        (resource_slice(pool=OTHER), OF_POOL),  # with a newer generation there the other node's devices count no more
        (for_all_nodes(), OF_POOL),
    ],
    ids=["another driver's", "in the pool of another node", "for all nodes"],
)
def test_a_slice_is_of_the_own_driver_node_and_pool(claims: Policy, strange: Document, told: str) -> None:
    for request in each_way(strange):
        (message,) = messages(claims, request)
        assert message.startswith(told)


def status(path: str = "", value: object = None, *devices: Document) -> Document:
    """A claim with some devices, of whose status something is another."""
    found = claim(*devices)
    return changed(on_status(found, found), path, value).object or {} if path else found


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("status.allocation.nodeSelector", claim(node=OTHER)["status"]["allocation"]["nodeSelector"], OTHER),
        ("status.allocation", None, "no node"),
        ("status.allocation.nodeSelector", None, "no node"),
        ("status", None, "no node"),
    ],
)
def test_the_status_of_a_claim_is_for_the_agent_of_its_node(
    claims: Policy, path: str, value: object, where: str
) -> None:
    told = f"the agent of node {NODE} may not write the status of a claim that is allocated to {where}"
    assert told in messages(claims, on_status(claim(device()), status(path, value)))


NVIDIA = device("gpu.nvidia.com")


@pytest.mark.parametrize(
    ("new", "old", "told"),
    [
        (
            status("status.reservedFor", [{"resource": "pods", "name": "q", "uid": "2"}], device()),
            claim(),
            [OF_DEVICES],
        ),
        (status("status.reservedFor", None, device()), claim(), [OF_DEVICES]),
        (status("status.allocation.devices.results", [], device()), claim(), [OF_DEVICES]),
        (status("status.allocation", None, device()), claim(), [OF_DEVICES]),
        (claim(NVIDIA), claim(), [OF_OTHER_DEVICES]),
        (claim(), claim(NVIDIA), [OF_OTHER_DEVICES]),
        (claim(device("gpu.nvidia.com", data={}), device()), claim(NVIDIA), [OF_OTHER_DEVICES]),
        (claim(device(), NVIDIA), claim(NVIDIA), []),
        (claim(NVIDIA), claim(NVIDIA, device()), []),
    ],
)
def test_of_a_claims_status_an_agent_changes_what_its_own_driver_says(
    claims: Policy, new: Document, old: Document, told: list[str]
) -> None:
    assert messages(claims, on_status(new, old)) == told


def test_an_agent_publishes_what_it_makes_of_its_node(claims: Policy) -> None:
    offered = Offered(recorded_node("h100-8gpu"), (VF, HCA))
    made = slices_of(offered.devices, DRIVER, NODE)
    assert len(made) > 1
    for document in made:
        assert claims.denials(on_slices("CREATE", dict(document))) == ()
        assert claims.denials(elsewhere(on_slices("CREATE", dict(document)))) != ()
    hold = Hold("vf", "rdma/vf", pool=NODE, device_name="vf-0000-18-00-1")
    attached = dict(entry(DRIVER, hold, 0.0, NetworkData("rdma0", addresses=("192.0.2.1/24",)), {}))
    assert claims.denials(on_status(claim(attached), claim())) == ()


def test_the_driver_is_the_configured_one(kube: Kube) -> None:
    values = copy.deepcopy(SWITCHES["dra"])
    values["config"]["dra"] = {"driver": "dra.example.com"}
    policy = policy_in(kube.template(values), OWN_DEVICES)
    assert policy.denials(on_slices("CREATE", resource_slice(driver="dra.example.com"))) == ()
    assert policy.denials(WRITES_OF_CLAIMS["create"]) != ()


def test_what_removes_the_agent_takes_the_slices_of_its_own_node_away(kube: Kube) -> None:
    found = kube.template({**SWITCHES["dra"], "remove": True})
    policy, removing = policy_in(found, OWN_DEVICES), f"{ACCOUNT}-remove"
    own = replace(WRITES_OF_CLAIMS["delete"], username=removing)
    assert policy.denials(own) == ()
    assert len(messages(policy, elsewhere(own))) == 1
    other = on_slices("DELETE", None, resource_slice(driver="gpu.nvidia.com"))
    assert len(messages(policy, replace(other, username=removing))) == 1
    (role,) = [d for d in found if d["kind"] == "ClusterRole"]
    assert [(rule["resources"], rule["verbs"]) for rule in role["rules"]] == [(["resourceslices"], ["list", "delete"])]


def test_without_claims_there_is_no_policy_and_no_class_for_them_and_who_wants_no_policy_has_none(kube: Kube) -> None:
    found = kube.template()
    assert [d["metadata"]["name"] for d in found if d["kind"] == "ValidatingAdmissionPolicy"] == ["nodefabric-own-node"]
    assert not [d for d in found if d["apiVersion"].startswith("resource.k8s.io/")]
    found = kube.template({**SWITCHES["dra"], "admissionPolicy": {"enabled": False}})
    assert not [d for d in found if d["kind"].startswith("ValidatingAdmissionPolicy")]
