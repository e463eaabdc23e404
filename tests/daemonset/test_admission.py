"""What the admission policy lets an agent write, and what it refuses: each expression evaluated by a CEL runtime."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from agent.node_events import NodeEvents
from tests.daemonset.admission import Policy, Request
from tests.daemonset.manifests import BASE, CHART, REPOSITORY, Document, Kube, documents, parsed

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
LABELS = update(node(labels={"kubernetes.io/hostname": NODE, "example.com/rails": "8"}, annotations={"a": "2"}))
WRITES = {"topology": TOPOLOGY, "volcano": VOLCANO, "event": EVENT, "labels": LABELS}


@pytest.fixture(scope="module")
def policy() -> Policy:
    """The one that is installed, as it is rendered."""
    return policy_in(documents(BASE / "admission.yaml"))


def policy_in(found: list[Document]) -> Policy:
    (document,) = [d for d in found if d["kind"] == "ValidatingAdmissionPolicy"]
    return Policy(document)


def messages(policy: Policy, request: Request) -> list[str]:
    denials = policy.denials(request)
    assert denials is not None, "the policy does not look at this"
    return [denial.message for denial in denials]


def test_every_expression_has_the_type_that_it_is_used_as(policy: Policy) -> None:
    assert (policy.type_of("node"), policy.type_of("about")) == ("STRING", "STRING")


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
        f"system:node:{NODE}",
        "oidc:nodefabric",
        "nodefabric",
    ],
)
def test_others_are_none_of_its_business(policy: Policy, username: str) -> None:
    for request in WRITES.values():
        assert policy.denials(replace(request, username=username, extra={})) is None


def test_wherever_it_is_installed_its_account_is_held_to_its_node(policy: Policy) -> None:
    """The namespace is the installer's choice, and kustomize would not change it in an expression."""
    moved = replace(TOPOLOGY, username="system:serviceaccount:rdma:nodefabric")
    assert policy.denials(moved) == ()
    assert policy.denials(replace(moved, extra={CLAIM: [OTHER]})) != ()


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
    [({}, True), ({"taints": []}, False), ({"unschedulable": True}, False), ({"podCIDR": "10.0.1.0/24"}, False)],
)
def test_of_a_node_the_spec_stays_as_it_is(policy: Policy, spec: Document, allowed: bool) -> None:
    told = messages(policy, update(node() | {"spec": node()["spec"] | spec}))
    assert told == ([] if allowed else ["the agent may not change the spec of a Node"])


@pytest.mark.parametrize("key", ["finalizers", "ownerReferences"])
def test_of_a_node_finalizers_and_owners_stay_as_they_are(policy: Policy, key: str) -> None:
    with_it = node()
    with_it["metadata"][key] = [{"uid": "1"}]
    for new, old in ((with_it, node()), (node(), with_it)):
        assert messages(policy, update(new, old)) == ["the agent may not change the finalizers and owners of a Node"]
    assert policy.denials(update(with_it, with_it)) == ()


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("node-restriction.kubernetes.io/zone", False),
        ("team.node-restriction.kubernetes.io/zone", False),
        ("node-role.kubernetes.io/control-plane", False),
        ("example.com/node-restriction.kubernetes.io", True),
        ("my-node-restriction.kubernetes.io/x", True),
        ("volcano.sh/tor", True),
        ("feature.node.kubernetes.io/rdma", True),
        ("plain", True),
    ],
)
def test_labels_that_others_trust_are_neither_set_nor_changed_nor_taken_away(
    policy: Policy, key: str, allowed: bool
) -> None:
    none, empty, one, two = (
        node(labels=labels) for labels in ({"a": "b"}, {"a": "b", key: ""}, {"a": "b", key: "1"}, {"a": "b", key: "2"})
    )
    bare = node()
    del bare["metadata"]["labels"]
    for new, old in ((one, none), (two, one), (none, one), (empty, none), (none, empty), (one, bare), (bare, one)):
        assert messages(policy, update(new, old)) == ([] if allowed else [RESTRICTED])
    for same in (none, empty, one, bare):
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
