"""What the admission policy lets an agent write, and what it refuses: each expression evaluated by a CEL runtime."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.node_events import NodeEvents
from agent.topology.node_taint import KEY
from tests.daemonset.admission import Policy, Request
from tests.daemonset.manifests import BASE, CHART, REPOSITORY, Document, Kube, documents, overlay, parsed

NODE, OTHER = "gpu-7", "gpu-8"
OBJECTS = REPOSITORY / "tests/agent/topology/objects"
ACCOUNT = "system:serviceaccount:nodefabric:nodefabric"
CLAIM = "authentication.kubernetes.io/node-name"
RESTRICTED = "the agent may not change labels of node-role.kubernetes.io and node-restriction.kubernetes.io"


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

        class Api:
            def create(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
                loop.call_soon_threadsafe(told.set_result, dict(document))
                return {}

        running = asyncio.ensure_future(NodeEvents(Api(), NODE, dict, lambda: "a new error").run())
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
    "labels": {"keys": {"example.com/rails": "rails", "plain.example/leaf.{nic}": "leaf-switch"}},
    "bandwidth": {"annotation": "example.com/load"},
}
WRITES = {"topology": TOPOLOGY, "volcano": VOLCANO, "event": EVENT, "labels": LABELS}


@pytest.fixture(scope="module")
def policy(kube: Kube) -> Policy:
    """The one that is installed with CONFIG."""
    return policy_in(kube.template({"config": {"topology": CONFIG}}))


def policy_in(found: list[Document]) -> Policy:
    (document,) = [d for d in found if d["kind"] == "ValidatingAdmissionPolicy"]
    return Policy(document)


def messages(policy: Policy, request: Request) -> list[str]:
    denials = policy.denials(request)
    assert denials is not None, "the policy does not look at this"
    return [denial.message for denial in denials]


def test_every_expression_has_the_type_that_it_is_used_as(policy: Policy) -> None:
    assert (policy.type_of("node"), policy.type_of("about")) == ("STRING", "STRING")
    assert (policy.type_of("foreignLabels"), policy.type_of("foreignAnnotations")) == ("LIST<DYN>", "LIST<DYN>")


@pytest.mark.parametrize("kind", ["Node", "Event"])
def test_the_api_server_has_nothing_to_warn_of_for_kinds_that_it_knows(policy: Policy, kind: str) -> None:
    assert policy.warnings(kind) == ()


def test_a_field_of_another_kind_would_be_warned_of() -> None:
    (document, *_) = documents(BASE / "admission.yaml")
    document["spec"]["validations"].append({"expression": "object.spec == oldObject.spec"})
    policy = Policy(document)
    assert policy.warnings("Node") == ()
    (warning,) = policy.warnings("Event")
    assert "undefined field 'spec'" in warning


@pytest.mark.parametrize("write", WRITES)
def test_an_agent_writes_what_is_of_its_own_node(policy: Policy, write: str) -> None:
    assert policy.denials(WRITES[write]) == ()


@pytest.mark.parametrize("write", ["topology", "volcano"])
def test_an_agent_updates_what_is_of_its_own_node(policy: Policy, write: str) -> None:
    again = replace(WRITES[write], operation="UPDATE", old_object=WRITES[write].object)
    assert policy.denials(again) == ()
    assert policy.denials(replace(again, extra={CLAIM: [OTHER]})) != ()


@pytest.mark.parametrize("write", WRITES)
def test_an_agent_does_not_write_of_another_node(policy: Policy, write: str) -> None:
    denials = policy.denials(replace(WRITES[write], extra={CLAIM: [OTHER]}))
    assert denials is not None
    assert [(d.message, d.reason) for d in denials] == [
        (f"the agent of node {OTHER} may not write of Node/{NODE}", "Forbidden")
    ]


@pytest.mark.parametrize("extra", [{}, {CLAIM: []}, {CLAIM: [""]}, {"authentication.kubernetes.io/pod-name": ["p"]}])
@pytest.mark.parametrize("write", WRITES)
def test_a_token_that_names_no_node_writes_nothing(policy: Policy, write: str, extra: dict[str, list[str]]) -> None:
    assert messages(policy, replace(WRITES[write], extra=extra)) == [
        "the token names no node; it must be that of a pod, and ServiceAccountTokenPodNodeInfo be on"
    ]


@pytest.mark.parametrize(
    "username",
    [
        "system:serviceaccount:nodefabric:default",
        "system:serviceaccount:nodefabric:other-nodefabric",
        "system:serviceaccount:nodefabric:nodefabric-remove",
        "system:serviceaccount:tenant:nodefabric",
        f"system:node:{NODE}",
        "oidc:nodefabric",
        "nodefabric",
    ],
)
def test_others_are_none_of_its_business(policy: Policy, username: str) -> None:
    for request in WRITES.values():
        assert policy.denials(replace(request, username=username, extra={})) is None


def test_in_another_namespace_it_is_the_account_of_that_one_which_is_held_to_its_node(kube: Kube) -> None:
    policy = policy_in(kube.template({"config": {"topology": CONFIG}}, namespace="rdma"))
    moved = replace(TOPOLOGY, username="system:serviceaccount:rdma:nodefabric")
    assert policy.denials(moved) == ()
    assert policy.denials(replace(moved, extra={CLAIM: [OTHER]})) != ()
    assert policy.denials(replace(TOPOLOGY, extra={CLAIM: [OTHER]})) is None


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
    ("spec", "allowed"),
    [({}, True), ({"unschedulable": True}, False), ({"podCIDR": "10.0.1.0/24"}, False), ({"podCIDRs": []}, False)],
)
def test_of_a_node_the_spec_stays_as_it_is(policy: Policy, spec: Document, allowed: bool) -> None:
    told = messages(policy, update(node() | {"spec": node()["spec"] | spec}))
    assert told == ([] if allowed else ["the agent may not change the spec of a Node"])


@pytest.mark.parametrize("taints", [[], [{"key": KEY, "effect": "NoSchedule"}]], ids=str)
def test_of_a_node_the_taints_stay_as_they_are(policy: Policy, taints: list[Document]) -> None:
    there = node()["spec"]["taints"]
    for new in (taints, [*there, *taints] if taints else []):
        assert messages(policy, update(node() | {"spec": node()["spec"] | {"taints": new}})) == [OF_TAINTS]


@pytest.fixture(params=["helm", "kustomize"], scope="module")
def tainting(kube: Kube, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """The policy where agents taint their Nodes while they restart."""
    if request.param == "helm":
        return policy_in(kube.template({"config": {"restart": {"taint": True}}}))
    return policy_in(kube.kustomize(overlay(tmp_path_factory.mktemp("restart"), "restart")))


MINE = {"key": KEY, "effect": "NoSchedule"}
OTHERS = {"key": "example.com/maintenance", "effect": "NoSchedule"}
OF_SPEC = "the agent may not change the spec of a Node"
OF_TAINTS = "the agent may not change the taints of a Node, but for the one of restart.taint"


def with_taints(*taints: Document) -> Document:
    found = node()
    found["spec"] = {**found["spec"], "taints": list(taints)}
    if not taints:
        del found["spec"]["taints"]
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([OTHERS], [OTHERS, MINE]),
        ([OTHERS, MINE], [OTHERS]),
        ([], [MINE]),
        ([MINE], []),
        ([{**MINE, "effect": "NoExecute"}, OTHERS], [OTHERS, MINE]),
        ([{**MINE, "effect": "NoExecute"}], [{**MINE, "effect": "NoExecute"}]),
    ],
)
def test_an_agent_changes_the_one_taint_that_is_its_own(
    tainting: Policy, policy: Policy, old: list[Document], new: list[Document]
) -> None:
    request = update(with_taints(*new), with_taints(*old))
    assert messages(tainting, request) == []
    assert messages(policy, request) == ([] if new == old else [OF_TAINTS])
    assert messages(tainting, replace(request, extra={CLAIM: [OTHER]})) != []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([OTHERS], []),
        ([OTHERS], [MINE]),
        ([OTHERS], [OTHERS, {**OTHERS, "key": "example.com/x"}]),
        ([OTHERS], [{**OTHERS, "effect": "PreferNoSchedule"}]),
        ([], [{**MINE, "effect": "NoExecute"}]),
        ([MINE], [MINE, {**MINE, "effect": "NoExecute"}]),
        ([], [{**MINE, "key": f"{KEY}-too"}]),
    ],
)
def test_an_agent_changes_no_other_taint(tainting: Policy, old: list[Document], new: list[Document]) -> None:
    assert messages(tainting, update(with_taints(*new), with_taints(*old))) == [OF_TAINTS]


@pytest.mark.parametrize("spec", [{"unschedulable": True}, {"podCIDR": "10.0.1.0/24"}, {"providerID": "aws:///x"}])
def test_who_may_taint_changes_nothing_else_of_the_spec(tainting: Policy, spec: Document) -> None:
    before = node()
    changed_spec = before | {"spec": before["spec"] | spec}
    assert messages(tainting, update(changed_spec, before)) == [OF_SPEC]
    assert messages(tainting, update(before, changed_spec)) == [OF_SPEC]


@pytest.mark.parametrize("write", ["topology", "volcano", "event"])
def test_who_may_taint_writes_all_else_as_before(tainting: Policy, write: str) -> None:
    assert tainting.denials(WRITES[write]) == ()
    assert tainting.denials(replace(WRITES[write], extra={CLAIM: [OTHER]})) != ()


@pytest.mark.parametrize("key", ["finalizers", "ownerReferences"])
def test_of_a_node_finalizers_and_owners_stay_as_they_are(policy: Policy, key: str) -> None:
    with_it = node()
    with_it["metadata"][key] = [{"uid": "1"}]
    for new, old in ((with_it, node()), (node(), with_it)):
        assert messages(policy, update(new, old)) == ["the agent may not change the finalizers and owners of a Node"]
    assert policy.denials(update(with_it, with_it)) == ()


def with_(what: str, values: dict[str, str]) -> Document:
    """Return the Node with these labels or annotations in place of its own."""
    document = node()
    document["metadata"][what] = values
    return document


OWN = ("example.com/rails", "plain.example/leaf.0000-3b-00.0", "plain.example/leaf.10000-3b-1f.7")
FOREIGN = (
    *("kubernetes.io/hostname", "topology.kubernetes.io/zone", "node.k8s.io/x", "feature.node.kubernetes.io/rdma"),
    *("example.com/rails2", "example-com/rails", "plain.example/leaf.", "plain.example/leaf.0000-3b-00.0.1", "pool"),
)
NAMED = {
    "labels": "labels but those of topology.labels",
    "annotations": "annotations but that of topology.bandwidth.annotation",
}


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
        "the agent may change no labels but those of topology.labels: example.com/rails",
        "the agent may change no annotations but that of topology.bandwidth.annotation: example.com/load",
    ]


def test_with_labels_in_a_file_for_nfd_it_sets_none_either(kube: Kube) -> None:
    topology = {**CONFIG, "labels": {**CONFIG["labels"], "to": "nfd"}}
    (told,) = messages(policy_in(kube.template({"config": {"topology": topology}})), LABELS)
    assert told.endswith(": example.com/rails")


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


@pytest.mark.parametrize(
    "key",
    [
        "node-restriction.kubernetes.io/zone",
        "team.node-restriction.kubernetes.io/zone",
        "node-role.kubernetes.io/control-plane",
    ],
)
def test_labels_that_others_trust_stay_whatever_the_configuration_says(kube: Kube, key: str) -> None:
    policy = policy_in(kube.template({"config": {"topology": {**CONFIG, "labels": {"keys": {key: "rails"}}}}}))
    none, empty, one, two = (
        node(labels=labels) for labels in ({"a": "b"}, {"a": "b", key: ""}, {"a": "b", key: "1"}, {"a": "b", key: "2"})
    )
    for new, old in ((one, none), (two, one), (none, one), (empty, none), (none, empty)):
        assert messages(policy, update(new, old)) == [RESTRICTED]
    for same in (none, empty, one):
        assert policy.denials(update(same, same)) == ()


def test_what_it_does_not_look_at_is_for_the_role_to_refuse(policy: Policy) -> None:
    """`test_rights.py` holds that the role lets an agent do nothing of this."""
    foreign = replace(LABELS, extra={CLAIM: [OTHER]})
    for unseen in (
        replace(foreign, operation="DELETE", old_object=foreign.object, object=None),
        replace(foreign, subresource="status"),
        replace(foreign, operation="CREATE"),
        replace(foreign, resource="pods"),
        replace(foreign, group="example.com"),
        replace(EVENT, operation="UPDATE", extra={}),
    ):
        assert policy.denials(unseen) is None


def test_of_a_release_with_another_name_the_account_is_another(kube: Kube) -> None:
    done = kube.run("helm", "template", "fabric", CHART, "-n", "nodefabric")
    assert done.returncode == 0, done.stderr
    policy = policy_in(parsed(done.stdout))
    assert policy.denials(replace(TOPOLOGY, extra={CLAIM: [OTHER]})) is None
    other = replace(TOPOLOGY, username="system:serviceaccount:nodefabric:fabric")
    assert policy.denials(other) == ()
    assert policy.denials(replace(other, extra={CLAIM: [OTHER]})) != ()


@pytest.mark.parametrize(
    "expression", ["request.userinfo.username != ''", "variables.node == 1", "variables.about.size()", "nothing"]
)
def test_an_expression_that_the_api_server_would_not_compile_is_noticed(expression: str) -> None:
    (document, *_) = documents(BASE / "admission.yaml")
    document["spec"]["validations"].append({"expression": expression})
    with pytest.raises((RuntimeError, AssertionError)):
        Policy(document)
