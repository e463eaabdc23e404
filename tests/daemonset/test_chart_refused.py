"""Values that the chart refuses, each with its place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.daemonset.manifests import CHART, Document, Kube

CASES = yaml.safe_load(Path(__file__).with_name("chart_refused.yaml").read_text())


@pytest.mark.parametrize("case", CASES["values"], ids=lambda case: case["says"])
def test_wrong_values_are_refused_with_their_place(kube: Kube, case: Document) -> None:
    done = kube.run("helm", "template", "nodefabric", CHART, "--values", "-", text=json.dumps(case["values"]))
    assert done.returncode != 0
    assert case["says"] in done.stderr


@pytest.mark.parametrize("case", CASES["resources"], ids=str)
def test_a_wrong_key_is_said_once(kube: Kube, case: Document) -> None:
    values = {"config": {"resources": [{"name": "rdma/x", **case["resource"]}]}}
    done = kube.run("helm", "template", "nodefabric", CHART, "--values", "-", text=json.dumps(values))
    assert done.returncode != 0
    told = re.findall(r"^ *- at '[^']*': (.+)$", done.stderr, re.MULTILINE)
    assert [line for line in told if not line.endswith("failed")] == [case["says"]]


def test_an_older_kubernetes_is_told_before_anything_is_installed(kube: Kube) -> None:
    words = ("helm", "template", "x", CHART, "--values", "-", "--kube-version")
    values = json.dumps({"config": {"resources": [{"name": "rdma/vf", "kind": "vf", "offer": "dra"}]}})
    done = kube.run(*words, "1.33.4", text=values)
    assert done.returncode != 0
    assert "offer: dra needs Kubernetes 1.34 or later (resource.k8s.io/v1), and this is v1.33.4" in done.stderr
    for version, text in (("1.34.0", values), ("1.34.0-eks-1", values), ("1.33.4", "{}")):
        assert kube.run(*words, version, text=text).returncode == 0
