"""Values that the chart refuses, each with its place."""

from __future__ import annotations

import json
import re

import pytest

from tests.daemonset.manifests import CHART, Document, Kube


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nodeSelectors": {}}, "nodeSelectors"),
        ({"updateStrategy": {"maxSurge": "1000%"}}, "/updateStrategy/maxSurge"),
        ({"updateStrategy": {"maxUnavailable": "10%"}}, "one of maxSurge and maxUnavailable must be 0"),
        ({"updateStrategy": {"maxSurge": 0}}, "no agent would ever be updated"),
        ({"removeForce": True}, "removeForce: has an effect only with remove: true"),
        ({"cni": {"replace": ["bridge"]}}, "/cni/replace/0"),
        ({"config": {"kubeletDirectory": "/var/lib/kubelet"}}, "kubeletDirectory"),
        ({"config": {"resources": [{"name": "rdma/vf", "kind": "vff"}]}}, "/config/resources/0"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"cni": {"ipamFolders": ["../kubernetes"]}}, "/cni/ipamFolders/0"),
        ({"localhostSeccompProfile": "/var/lib/kubelet/seccomp/x.json"}, "/localhostSeccompProfile"),
        ({"seLinuxOptions": {"tpye": "spc_t"}}, "tpye"),
        (
            {"config": {"resources": [{"name": "rdma/vf", "kind": "vf", "network": "nosuch"}]}},
            'config.resources[0].network: "nosuch" is not among config.networks (rails)',
        ),
        (
            {"config": {"networks": [], "resources": [{"name": "rdma/vf", "kind": "vf", "network": "rails"}]}},
            'config.resources[0].network: "rails" is not among config.networks ()',
        ),
        ({"podMonitor": {"enabled": True}}, "Prometheus does not reach loopback"),
        ({"config": {"endpoints": {"port": 0}}}, "config.endpoints.port: 0 is another port at each start"),
        (
            {
                "config": {
                    "resources": [{"name": name, "kind": "vf", "offer": "dra"} for name in ("rdma/vf", "rdma/VF")]
                }
            },
            "rdma/vf and rdma/VF would both have the DeviceClass rdma-vf",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_wrong_values_are_refused_with_their_place(kube: Kube, values: Document, said: str) -> None:
    done = kube.run("helm", "template", "nodefabric", CHART, "--values", "-", text=json.dumps(values))
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.parametrize(
    ("resource", "said"),
    [
        ({"kind": "vf", "nmae": 1}, ["additional properties 'nmae' not allowed"]),
        ({"kind": "vff"}, ["value must be one of 'hca', 'vf', 'nic', 'gpu', 'rail', 'accelerator'"]),
        ({}, ["missing property 'kind'"]),
        ({"kind": "hca", "select": {"pff": []}}, ["additional properties 'pff' not allowed"]),
        ({"kind": "hca", "select": [{"pff": []}]}, ["additional properties 'pff' not allowed"]),
        ({"kind": "hca", "select": "ens1f0"}, ["got string, want array or object"]),
        ({"kind": "rail", "nic": {"slect": {}}}, ["additional properties 'slect' not allowed"]),
        ({"kind": "rail", "nic": {"kind": "hca", "shares": "63"}}, ["got string, want integer"]),
    ],
    ids=str,
)
def test_a_wrong_key_is_said_once(kube: Kube, resource: Document, said: list[str]) -> None:
    values = {"config": {"resources": [{"name": "rdma/x", **resource}]}}
    done = kube.run("helm", "template", "nodefabric", CHART, "--values", "-", text=json.dumps(values))
    assert done.returncode != 0
    told = re.findall(r"^ *- at '[^']*': (.+)$", done.stderr, re.MULTILINE)
    assert [line for line in told if not line.endswith("failed")] == said


def test_an_older_kubernetes_is_told_before_anything_is_installed(kube: Kube) -> None:
    words = ("helm", "template", "x", CHART, "--values", "-", "--kube-version")
    values = json.dumps({"config": {"resources": [{"name": "rdma/vf", "kind": "vf", "offer": "dra"}]}})
    done = kube.run(*words, "1.33.4", text=values)
    assert done.returncode != 0
    assert "offer: dra needs Kubernetes 1.34 or later (resource.k8s.io/v1), and this is v1.33.4" in done.stderr
    for version, text in (("1.34.0", values), ("1.34.0-eks-1", values), ("1.33.4", "{}")):
        assert kube.run(*words, version, text=text).returncode == 0
