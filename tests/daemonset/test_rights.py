"""The agent may ask the API server for what it asks for, and for nothing else: role, policy and client compared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cluster.apiserver import CLAIM, DAEMONSET, NODE, NUMATOPOLOGY, POD, SLICE, TOPOLOGY, ApiServer
from agent.cluster.object_watch import read_pod
from tests.daemonset.manifests import Document, Kube, named, pod
from tests.hostile.answering import Asked as Request
from tests.hostile.answering import asking

Right = tuple[str, str, str, str]
"""API group, resource, verb, namespace ("" for all or none)."""
CLAIMS: Document = {"resources": [{"name": "rdma/vf", "kind": "vf", "offer": "dra", "binding": "late"}]}
LABELS: Document = {"labels": {"keys": {"example.com/rails": "rails"}}}
CONFIGURATIONS: dict[str, Document] = {
    "publish": {"topology": {"publish": True}},
    "pods from kubelet": {"topology": {"publish": True, "fingerprint": {"pods": "podresources"}}},
    "the scheduler shares its informer": {"topology": {"publish": True, "fingerprint": {"pods": "shared"}}},
    "a method that needs the API's pods": {
        "topology": {"publish": True, "fingerprint": {"method": "with-exclusive-resources"}}
    },
    "volcano": {"topology": {"publish": False, "volcano": True}},
    "labels": {"topology": {"publish": False, **LABELS}},
    "annotation": {"topology": {"publish": False, "bandwidth": {"annotation": "example.com/load"}}},
    "all": {"topology": {"publish": True, "volcano": True, **LABELS}},
    "taint": {"topology": {"publish": False}, "restart": {"taint": True}},
    "claims": {"topology": {"publish": False}, **CLAIMS},
}
OF_DRIVER: set[Right] = {
    ("resource.k8s.io", "resourceclaims/driver", f"associated-node:{verb}", "") for verb in ("patch", "update")
}
"""What kube-apiserver asks for beside the writing of a claim's status."""


class Asked:
    """A client, and what it has asked for."""

    def __init__(self, client: ApiServer, seen: list[tuple[str, str]]) -> None:
        self.client, self._seen = client, seen

    @property
    def rights(self) -> set[Right]:
        found: set[Right] = set()
        for method, url in self._seen:
            path, _, query = url.partition("?")
            match = re.fullmatch(r"/(?:api|apis/([^/]+))/[^/]+(?:/namespaces/([^/]+))?/([^/]+)(/n(/status)?)?", path)
            assert match is not None, url
            verbs = {"GET": ["get"], "PATCH": ["patch"], "PUT": ["update"], "POST": ["create"], "DELETE": ["delete"]}[
                method
            ]
            if method == "GET" and match[4] is None:
                verbs = ["watch" if "watch=true" in query else "list"]
            # An apply creates the object if there is none, and the API server asks for both. A Node is always there,
            # and so is what has a status.
            if method == "PATCH" and match[3] != "nodes" and not match[5]:
                verbs = ["patch", "create"]
            found |= {(match[1] or "", f"{match[3]}{match[5] or ''}", verb, match[2] or "") for verb in verbs}
        return found


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    seen: list[tuple[str, str]] = []
    found = {"metadata": {"uid": "u", "name": "n", "resourceVersion": "1"}}
    body = json.dumps({**found, "items": [], "type": "BOOKMARK", "object": found}).encode() + b"\n"

    def note(request: Request) -> None:
        seen.append((request.command, request.path))
        request.send(body)

    with asking(tmp_path, note) as client:
        yield Asked(client, seen)


def allowed(found: list[Document]) -> set[Right]:
    """List the rights that roles give to the agent's account."""
    given: set[Right] = set()
    for kind, binding_kind in (("ClusterRole", "ClusterRoleBinding"), ("Role", "RoleBinding")):
        for role in (d for d in found if d["kind"] == kind):
            name = role["metadata"]["name"]
            (binding,) = [d for d in found if d["kind"] == binding_kind and d["roleRef"]["name"] == name]
            account = named(found, "ServiceAccount")
            assert binding["metadata"].get("namespace") == role["metadata"].get("namespace")
            (subject,) = binding["subjects"]
            assert {key: account["metadata"][key] for key in ("name", "namespace")} == {
                key: subject[key] for key in ("name", "namespace")
            }
            given |= {
                (group, resource, verb, role["metadata"].get("namespace", ""))
                for rule in role["rules"]
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
    return given


def work(client: ApiServer, conf: Document) -> None:
    """Call what the agent calls with this configuration."""
    topology, document = conf["topology"], {"metadata": {"name": "n"}}
    client.metadata(NODE, "n")
    client.create("/api/v1/namespaces/default/events", {"kind": "Event"})
    for wanted, kind in ((topology["publish"], TOPOLOGY), (topology.get("volcano"), NUMATOPOLOGY)):
        if wanted:
            client.get(kind, "n")
            client.apply(kind, document, force=False)
    if topology["publish"] and topology.get("fingerprint", {}).get("pods") != "podresources":
        client.list_of(POD, {"spec.nodeName": "n"}, read_pod)
        list(client.watch(POD, {"spec.nodeName": "n"}, "0", 1))
    if "labels" in topology or "bandwidth" in topology:
        client.apply(NODE, document, force=False)
    if "restart" in conf:
        client.current(NODE, "n")
        client.merge(NODE, "n", {"spec": {"taints": None}})
        client.current(DAEMONSET.within("nodefabric"), "n")
    if "resources" in conf:
        fields = {"spec.driver": "nodefabric.io", "spec.nodeName": "n"}
        client.list_of(SLICE, fields, str)
        list(client.watch(SLICE, fields, "0", 1))
        client.apply(SLICE, document, force=True)
        client.delete(SLICE, "n", "u")
        client.current(CLAIM.within("a"), "n")
        client.apply_status(CLAIM.within("a"), document)
        client.replace_status(CLAIM.within("a"), document, blanks=False)
        client.current(POD.within("a"), "n")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_role_allows_what_the_client_calls_and_policies_look_at_what_it_writes(
    kube: Kube, asked: Asked, name: str
) -> None:
    work(asked.client, CONFIGURATIONS[name])
    found = kube.template({"config": CONFIGURATIONS[name]})
    # By namespace as roles of the cluster give them: in any.
    rights = {(group, what, verb, "" if where == "a" else where) for group, what, verb, where in asked.rights}
    assert allowed(found) == rights | (OF_DRIVER if name == "claims" else set())
    for rule in (r for d in found if d["kind"] == "Role" for r in d["rules"] if "daemonsets" in r["resources"]):
        assert rule["resourceNames"] == ["nodefabric"]
    assert [v["name"] for v in pod(found)["volumes"] if "projected" in v] == ["api-token"]
    policies = [d for d in found if d["kind"] == "ValidatingAdmissionPolicy"]
    read_by_policies = {
        (group, resource, operation)
        for policy in policies
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for operation in rule["operations"]
    }
    operations = {"create": "CREATE", "patch": "UPDATE", "update": "UPDATE", "delete": "DELETE"}
    assert read_by_policies >= {
        (group, what, operations[verb]) for group, what, verb, _ in rights if verb in operations
    }
    bindings = [d["spec"] for d in found if d["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert [(spec["policyName"], spec["validationActions"]) for spec in bindings] == [
        (policy["metadata"]["name"], ["Deny"]) for policy in policies
    ]
    for policy in policies:
        assert policy["spec"]["failurePolicy"] == "Fail"
        account = policy["spec"]["matchConditions"][0]["expression"]
        assert account == 'request.userInfo.username == "system:serviceaccount:nodefabric:nodefabric"'
