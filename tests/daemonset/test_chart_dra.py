"""What the chart makes of resources that are handed out by claims: classes, folders, rights."""

from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
import pytest

from agent.__main__ import _parser
from agent.cluster.apiserver import SERVICE_ACCOUNT
from agent.config.sections import DRIVER
from tests.daemonset.manifests import CHART, SWITCHES, Document, Kube, container, host_paths, pod

Right = tuple[str, str, str]
BASIC = {
    *(("resource.k8s.io", "resourceslices", verb) for verb in ("list", "watch", "create", "patch", "delete")),
    ("resource.k8s.io", "resourceclaims", "get"),
    ("resource.k8s.io", "deviceclasses", "list"),
}
STATUS = {
    ("resource.k8s.io", "resourceclaims/status", "patch"),
    ("resource.k8s.io", "resourceclaims/status", "update"),
    ("resource.k8s.io", "resourceclaims/driver", "associated-node:patch"),
    ("resource.k8s.io", "resourceclaims/driver", "associated-node:update"),
}
PODS = {("", "pods", "get")}
VF: Document = {"name": "rdma/vf", "kind": "vf", "offer": "dra"}


def with_resources(*resources: Document, **config: Any) -> Document:
    return {"config": {"resources": list(resources), **config}}


def classes(found: list[Document]) -> dict[str, Document]:
    return {d["metadata"]["name"]: d["spec"] for d in found if d["kind"] == "DeviceClass"}


def test_a_resource_with_a_network_for_each_pf_leaves_its_class_without_one(kube: Kube) -> None:
    by_pf = {**VF, "network": {"ens1f0np0": "a", "ens2f0np0": "b"}}
    networks = [{"name": "a"}, {"name": "b"}]
    assert "config" not in classes(kube.template(with_resources(by_pf, networks=networks)))["rdma-vf"]


def test_an_older_kubernetes_is_told_before_anything_is_installed(kube: Kube) -> None:
    words = ("helm", "template", "x", CHART, "--values", "-", "--kube-version")
    values = json.dumps(with_resources(VF))
    done = kube.run(*words, "1.33.4", text=values)
    assert done.returncode != 0
    assert "offer: dra needs Kubernetes 1.34 or later (resource.k8s.io/v1), and this is v1.33.4" in done.stderr
    assert kube.run(*words, "1.34.0", text=values).returncode == 0
    assert kube.run(*words, "1.34.0-eks-1", text=values).returncode == 0
    assert kube.run(*words, "1.33.4", text="{}").returncode == 0


def more_rights(kube: Kube, values: Document) -> set[Right]:
    """Tell what the role has with these values that it has not without claims."""
    without = {"config": {k: v for k, v in values["config"].items() if k != "resources"}}
    both = []
    for each in (values, without):
        (role,) = [d for d in kube.template(each) if d["kind"] == "ClusterRole"]
        both.append(
            {
                (g, r, v)
                for rule in role["rules"]
                for g in rule["apiGroups"]
                for r in rule["resources"]
                for v in rule["verbs"]
            }
        )
    return both[0] - both[1]


def test_each_resource_with_claims_has_a_class_that_unchanged_pods_find_too(kube: Kube) -> None:
    plugin = {"name": "rdma/hca", "kind": "hca"}
    other = {"name": "example.com/Big_nic", "kind": "nic", "offer": "dra"}
    found = classes(kube.template(with_resources(plugin, {**VF, "network": "rails"}, other)))
    assert found == {
        "rdma-vf": {
            "extendedResourceName": "rdma/vf",
            "selectors": [
                {
                    "cel": {
                        "expression": f'device.driver == "{DRIVER}" &&'
                        f' device.attributes["{DRIVER}"].resource == "rdma/vf"'
                    }
                }
            ],
            "config": [
                {
                    "opaque": {
                        "driver": DRIVER,
                        "parameters": {
                            "apiVersion": "nodefabric.io/v1alpha1",
                            "kind": "Network",
                            "network": "rails",
                        },
                    }
                }
            ],
        },
        "example.com-big-nic": {
            "extendedResourceName": "example.com/Big_nic",
            "selectors": [
                {
                    "cel": {
                        "expression": f'device.driver == "{DRIVER}" &&'
                        f' device.attributes["{DRIVER}"].resource == "example.com/Big_nic"'
                    }
                }
            ],
        },
    }


def test_classes_name_the_driver_that_the_configuration_names(kube: Kube) -> None:
    found = classes(kube.template(with_resources({**VF, "network": "rails"}, dra={"driver": "dra.example.com"})))
    text = json.dumps(found)
    assert text.count("dra.example.com") == 3
    assert f'"{DRIVER}"' not in text


def test_of_several_releases_one_has_the_classes(kube: Kube) -> None:
    assert classes(kube.template({**with_resources(VF), "deviceClasses": {"enabled": False}})) == {}


def test_two_resources_that_would_have_one_class_are_refused(kube: Kube) -> None:
    values = with_resources(VF, {**VF, "name": "rdma/VF"})
    done = kube.run("helm", "template", "nodefabric", CHART, "--values", "-", text=json.dumps(values))
    assert "rdma/vf and rdma/VF would both have the DeviceClass rdma-vf" in done.stderr


@pytest.mark.parametrize(
    ("resource", "dra", "rights"),
    [
        ({}, {}, BASIC | STATUS),
        ({}, {"status": True}, BASIC | STATUS),
        ({}, {"status": False}, BASIC),
        ({"binding": "late"}, {}, BASIC | STATUS | PODS),
        ({"environment": ["nccl"]}, {}, BASIC | STATUS | PODS),
        ({"offer": "devicePlugin", "binding": "late", "environment": ["nccl"]}, {}, set()),
    ],
)
def test_the_role_has_what_claims_need_and_no_more(
    kube: Kube, resource: Document, dra: Document, rights: set[Right]
) -> None:
    assert more_rights(kube, with_resources({**VF, **resource}, dra=dra)) == rights


def test_the_status_of_other_drivers_devices_is_none_of_its_rights(kube: Kube) -> None:
    (role,) = [d for d in kube.template(with_resources(VF)) if d["kind"] == "ClusterRole"]
    (rule,) = [rule for rule in role["rules"] if "resourceclaims/driver" in rule["resources"]]
    assert rule["resourceNames"] == [DRIVER]


def test_there_is_a_token_though_nothing_else_asks_the_api_server(kube: Kube) -> None:
    values = with_resources(VF, topology={"publish": False})
    assert [v["name"] for v in pod(kube.template(values))["volumes"] if "projected" in v] == ["api-token"]


def test_kubelet_finds_the_driver_by_the_same_paths_as_the_agent(kube: Kube) -> None:
    values = with_resources(VF, kubeletDir="/data/kubelet", dra={"driver": "dra.example.com"})
    spec = pod(kube.template(values))
    mounts = {m["mountPath"]: m for m in container(spec, "agent")["volumeMounts"]}
    for path in ("/data/kubelet/plugins_registry", "/data/kubelet/plugins/dra.example.com", "/var/run/cdi"):
        assert host_paths(spec)[mounts[path]["name"]] == path
        assert not mounts[path].get("readOnly", False)


def test_while_claims_end_the_agent_keeps_what_it_needs_for_that(kube: Kube) -> None:
    """Back at a device plugin."""
    plugin = {k: v for k, v in VF.items() if k != "offer"}
    with_claims, gone = kube.template(with_resources(VF)), kube.template(with_resources(plugin))
    ending = kube.template({**with_resources(plugin), "keepClaims": True})
    kept = ("ClusterRole", "ValidatingAdmissionPolicy", "ServiceAccount")
    for found, same in ((ending, True), (gone, False)):
        assert ([d for d in found if d["kind"] in kept] == [d for d in with_claims if d["kind"] in kept]) is same
        assert (host_paths(pod(found)) == host_paths(pod(with_claims))) is same
        assert classes(found) == {}


def test_what_removes_asks_for_the_slices_of_its_node_with_an_account_of_its_own(kube: Kube) -> None:
    found = kube.template({**SWITCHES["dra"], "remove": True})
    spec = pod(found)
    uninstall = container(spec, "uninstall")
    options = _parser().parse_args(uninstall["args"])
    assert (options.slices_of, options.kubeconfig) == ("$(NODE_NAME)", None)
    assert {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}} in uninstall["env"]
    (account,) = [d for d in found if d["kind"] == "ServiceAccount"]
    assert spec["serviceAccountName"] == account["metadata"]["name"] == "nodefabric-remove"
    having = [
        c["name"]
        for c in (*spec["containers"], *spec["initContainers"])
        for m in c.get("volumeMounts", ())
        if m["mountPath"] == str(SERVICE_ACCOUNT)
    ]
    assert having == ["uninstall"]
    plain = kube.template({"remove": True})
    assert {d["kind"] for d in plain} == {"DaemonSet"}
    assert "slices" not in json.dumps(plain)


@pytest.mark.parametrize("version", ["1.34", "1.37"])
def test_what_removes_fits_kubernetes_own_schemas(kube: Kube, version: str) -> None:
    for document in kube.template({**SWITCHES["dra"], "remove": True}):
        assert kubernetes_validate.validate(document, version, strict=True).startswith(version)


def test_without_claims_the_agent_sees_no_folder_of_drivers(kube: Kube) -> None:
    spec = pod(kube.template(with_resources({**VF, "offer": "devicePlugin"})))
    assert not [path for path in host_paths(spec).values() if "/plugins" in path and "device-plugins" not in path]


def test_claims_change_nothing_about_what_the_agent_may_do_on_the_node(kube: Kube) -> None:
    plain, claims = pod(kube.template()), pod(kube.template(SWITCHES["dra"]))
    assert claims["securityContext"] == plain["securityContext"]
    for name in ("agent", "install-cni"):
        assert container(claims, name)["securityContext"] == container(plain, name)["securityContext"]
