"""Which labels and annotations of its Node the admission policy lets an agent change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.daemonset.admission import Policy
from tests.daemonset.manifests import REPOSITORY, Document, Kube, overlay
from tests.daemonset.node_writes import (
    CONFIG,
    LABELS,
    messages,
    node,
    policy_in,
    update,
)
from tests.daemonset.node_writes import policy as policy  # the fixture

RESTRICTED = "the agent may not change labels of node-role.kubernetes.io and node-restriction.kubernetes.io"


def with_(what: str, values: dict[str, str]) -> Document:
    """Return the Node with these labels or annotations in place of its own."""
    document = node()
    document["metadata"][what] = values
    return document


OWN = (
    "example.com/rails",
    "plain.example/leaf.0000-3b-00.0",
    "plain.example/leaf.10000-3b-1f.7",
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
