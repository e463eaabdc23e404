"""What the admission policy lets an agent write, and what it refuses: each expression evaluated by a CEL runtime."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from agent.cluster.node_taint import KEY
from tests.daemonset.admission import Policy, Request
from tests.daemonset.manifests import BASE, CHART, Document, Kube, documents, overlay, parsed
from tests.daemonset.node_writes import (
    CLAIM,
    CONFIG,
    EVENT,
    LABELS,
    NODE,
    OTHER,
    TOPOLOGY,
    WRITES,
    messages,
    node,
    policy_in,
    update,
)
from tests.daemonset.node_writes import policy as policy  # the fixture


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
