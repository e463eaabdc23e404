"""The chart, by real helm."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from agent import config
from agent.cluster.apiserver import SERVICE_ACCOUNT
from agent.cluster.node_taint import DAEMON_SET, DEFAULT_TIMES, KEY
from agent.commands.run import STOP_SECONDS
from agent.config.networks import REPLACED
from agent.config.sections import MAX_WAIT_SECONDS
from agent.hardware.netlink import configuring
from agent.operator import probe
from cni import netconf
from tests.daemonset.manifests import (
    CHART,
    FOLDER,
    SWITCHES,
    Document,
    Kube,
    container,
    documents,
    host_paths,
    identity,
    named,
    pod,
)

OLDEST, OLDEST_WITH_CLAIMS, NEWEST = "1.30", "1.34", "1.37"
EXTENSIONS = ("monitoring.coreos.com/", "k8s.cni.cncf.io/", "kustomize.config.k8s.io/", "batch.volcano.sh/")


def test_the_chart_stands_helms_own_examination(kube: Kube) -> None:
    done = kube.run("helm", "lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("switch", [None, "remove", *SWITCHES], ids=str)
def test_what_is_rendered_fits_kubernetes_own_schemas(kube: Kube, switch: str | None, version: str) -> None:
    values = {"remove": True} if switch == "remove" else SWITCHES[switch] if switch else {}
    found = kube.template(values)
    if switch == "dra" and version == OLDEST:
        version = OLDEST_WITH_CLAIMS
    for document in found:
        if not document["apiVersion"].startswith(EXTENSIONS):
            assert kubernetes_validate.validate(document, version, strict=True).startswith(version)
    kinds_found = {d["kind"] for d in found}
    assert kinds_found >= ({"DaemonSet"} if switch == "remove" else {"DaemonSet", "ClusterRole", "ConfigMap"})


def test_the_schemas_would_find_a_wrong_key(kube: Kube) -> None:
    document = named(kube.template(), "DaemonSet")
    document["spec"]["template"]["spec"]["hostNetwrok"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, NEWEST, strict=True)


def test_the_configuration_in_the_config_map_is_that_of_the_base(kube: Kube) -> None:
    rendered = config.parse(named(kube.template(), "ConfigMap")["data"]["config.yaml"], "chart")
    base = (FOLDER / "base/config.yaml").read_text()
    assert rendered == config.parse(base, "base")
    assert base.count("#") > 5  # with its comments


def test_the_configuration_decides_about_paths_ports_and_probes(kube: Kube) -> None:
    values = {
        "config": {
            "kubeletDir": "/data/kubelet",
            "stateDir": "/data/nodefabric",
            "runDir": "/run/fabric",
            "runtimeSocket": "/run/k3s/containerd/containerd.sock",
            "netnsDirs": ["/data/netns", "/run/docker/netns"],
            "endpoints": {"address": "0.0.0.0", "port": 9900},
            "topology": {"kubeletConfig": "/data/kubelet/config.yaml"},
            "networks": [{"name": "rails", "ipam": {"type": "whereabouts", "range": "10.0.0.0/24"}}],
        },
        "cni": {"binDir": "/usr/libexec/cni", "confDir": "/etc/kubernetes/cni"},
    }
    spec = pod(kube.template(values))
    agent = container(spec, "agent")
    mounts = {mount["mountPath"]: mount for mount in agent["volumeMounts"]}
    shown = host_paths(spec)
    for path in (
        *("/data/kubelet/device-plugins", "/data/kubelet/pod-resources", "/data/kubelet/config.yaml"),
        *("/data/nodefabric", "/run/fabric", "/run/k3s/containerd", "/usr/libexec/cni"),
        "/etc/kubernetes/cni/whereabouts.d",
        *("/data/netns", "/run/docker/netns"),
    ):
        assert shown[mounts[path]["name"]] == path
    assert "/var/run/netns" not in mounts


@pytest.mark.parametrize("nodes", [3, "10%"])
def test_agents_are_ended_before_the_next_ones_start_where_that_is_wanted(kube: Kube, nodes: int | str) -> None:
    document = named(kube.template({"updateStrategy": {"maxSurge": 0, "maxUnavailable": nodes}}), "DaemonSet")
    assert document["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": nodes}


@pytest.mark.parametrize("config", [{}, {"cdiDir": "/etc/cdi"}, {"cdiDir": "/etc/cdi/"}])
def test_no_path_is_mounted_twice_which_the_api_server_refuses(kube: Kube, config: Document) -> None:
    spec = pod(kube.template({"config": config}))
    paths = [mount["mountPath"].rstrip("/") for mount in container(spec, "agent")["volumeMounts"]]
    assert len(paths) == len(set(paths))
    assert "/etc/cdi" in paths


@pytest.mark.parametrize(
    ("values", "is_mounted"),
    [
        ({}, False),
        ({"writableSysctls": True}, True),
        ({"config": {"networks": [{"name": "rails"}, {"name": "b", "sysctls": {"arp_notify": 1}}]}}, False),
        ({"config": {"networks": [{"name": "rails"}, {"name": "b", "sysctls": {"accept_ra": 0}}]}}, True),
        ({"config": {"networks": [{"name": name, "sysctls": {"disable_ipv6": 1}} for name in ("rails", "b")]}}, True),
    ],
)
def test_the_hosts_settings_are_mounted_where_a_network_sets_those_of_ipv6(
    kube: Kube, values: Document, is_mounted: bool
) -> None:
    spec = pod(kube.template(values))
    mounts = {mount["mountPath"]: mount["name"] for mount in container(spec, "agent")["volumeMounts"]}
    assert (host_paths(spec).get(mounts.get(str(configuring.FILES[0]), "")) == "/proc/sys/net") is is_mounted


def test_probes_ask_the_agents_own_socket_whatever_port_it_has(kube: Kube) -> None:
    spec = pod(kube.template({"config": {"endpoints": {"address": "0.0.0.0", "port": 9900}}}))
    agent = container(spec, "agent")
    for name, question in (("startupProbe", "healthz"), ("livenessProbe", "healthz"), ("readinessProbe", "readyz")):
        assert agent[name]["exec"] == {"command": ["nodefabric-probe", question]}
        assert agent[name]["timeoutSeconds"] > probe.SECONDS  # it tells itself that nobody answers
    (told,) = [entry["value"] for entry in agent["env"] if entry["name"] == probe.SOCKET]
    # Of the pod alone: a folder of the host's would be there for the agent of another pod too.
    assert Path(told).parent == Path("/dev/shm")
    assert not [mount for mount in agent["volumeMounts"] if mount["mountPath"].startswith("/dev")]


def ipam_folders(kube: Kube, values: Document) -> dict[str, str]:
    """Tell what of the networks' configurations the agent's container is shown: path there → path of the host."""
    spec = pod(kube.template(values))
    shown = host_paths(spec)
    mounts = [m for m in container(spec, "agent")["volumeMounts"] if m["mountPath"].startswith("/etc/cni")]
    assert all(mount["readOnly"] for mount in mounts)
    return {mount["mountPath"]: shown[mount["name"]] for mount in mounts}


def test_of_the_networks_configurations_the_agent_sees_what_its_ipam_plugins_read(kube: Kube) -> None:
    """Others' kubeconfigs are in the same folder."""
    assert ipam_folders(kube, {}) == {}
    networks = [
        {"name": "rails", "ipam": {"type": "whereabouts", "range": "10.0.0.0/24"}},
        {"name": "more", "ipam": {"type": "whereabouts", "range": "10.0.1.0/24"}},
        {"name": "pool", "ipam": {"type": "nv-ipam"}},
        {"name": "plain", "ipam": {"type": "host-local"}},
        {"name": "none", "ipam": {}},
    ]
    named = {f"/etc/cni/net.d/{name}": f"/etc/cni/net.d/{name}" for name in ("whereabouts.d", "nv-ipam.d")}
    assert ipam_folders(kube, {"config": {"networks": networks}}) == named
    attachment = {"name": "a", "resourceName": "rdma/vf", "config": {"ipam": {"type": "nv-ipam"}}}
    assert [*ipam_folders(kube, {"networkAttachments": [attachment]})] == ["/etc/cni/net.d/nv-ipam.d"]
    assert [*ipam_folders(kube, {"cni": {"ipamFolders": ["own.d"]}})] == ["/etc/cni/net.d/own.d"]
    assert [*ipam_folders(kube, {"cni": {"ipamFolders": ["."]}})] == ["/etc/cni/net.d"]


def test_the_whole_folder_of_networks_is_for_who_chains(kube: Kube) -> None:
    spec = pod(kube.template({"cni": {"chain": True}}))
    (volume,) = [name for name, path in host_paths(spec).items() if path == "/etc/cni/net.d"]
    having = [c["name"] for c in spec["containers"] if volume in {m["name"] for m in c["volumeMounts"]}]
    assert having == ["cni-chain"]
    assert "/etc/cni/net.d" not in host_paths(pod(kube.template())).values()


def test_the_token_is_in_the_container_that_publishes_alone(kube: Kube) -> None:
    spec = pod(kube.template({"cni": {"chain": True}}))
    assert spec["automountServiceAccountToken"] is False
    (volume,) = [v for v in spec["volumes"] if "projected" in v]
    sources = {kind: told for source in volume["projected"]["sources"] for kind, told in source.items()}
    assert sources["serviceAccountToken"]["path"] == "token"
    assert sources["configMap"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    having = {
        c["name"]: m["mountPath"]
        for c in (*spec["containers"], *spec["initContainers"])
        for m in c["volumeMounts"]
        if m["name"] == volume["name"]
    }
    assert having == {"agent": str(SERVICE_ACCOUNT)}


def test_selinux_and_seccomp_are_as_the_values_say(kube: Kube) -> None:
    plain = pod(kube.template())
    assert plain["securityContext"] == {"runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"}}
    assert "seccompProfile" not in container(plain, "agent")["securityContext"]
    profile = {"type": "Localhost", "localhostProfile": "nodefabric.json"}
    values = {"seLinuxOptions": {"type": "spc_t"}, "localhostSeccompProfile": "nodefabric.json"}
    spec = pod(kube.template(values))
    assert spec["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(spec, "agent")["securityContext"]["seccompProfile"] == profile
    removing = pod(kube.template({"remove": True, "seLinuxOptions": {"type": "spc_t"}}))
    assert removing["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}


def test_a_removal_can_be_forced(kube: Kube) -> None:
    assert "--force" not in container(pod(kube.template({"remove": True})), "uninstall")["args"]
    forced = pod(kube.template({"remove": True, "removeForce": True}))
    assert "--force" in container(forced, "uninstall")["args"]


def test_without_publishing_there_is_no_token_role_or_policy(kube: Kube) -> None:
    found = kube.template({"config": {"topology": {"publish": False}}})
    assert not [v for v in pod(found)["volumes"] if "projected" in v]
    assert {d["kind"] for d in found} == {"ServiceAccount", "ConfigMap", "DaemonSet"}
    assert named(found, "ServiceAccount")["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("tolerations", "more"),
    [
        ([{"operator": "Exists"}], []),
        ([{"key": "gpu", "operator": "Exists"}], [{"key": KEY, "operator": "Exists"}]),
        ([], [{"key": KEY, "operator": "Exists"}]),
    ],
)
def test_an_agent_can_start_on_a_node_that_the_one_before_has_tainted(
    kube: Kube, tolerations: list[Document], more: list[Document]
) -> None:
    values = {"tolerations": tolerations, "config": {"restart": {"taint": True}, "topology": {"publish": False}}}
    spec = pod(kube.template(values))
    assert spec["tolerations"] == tolerations + more
    agent = container(spec, "agent")
    assert str(SERVICE_ACCOUNT) in [mount["mountPath"] for mount in agent["volumeMounts"]]
    assert {"name": DAEMON_SET, "value": "nodefabric/nodefabric"} in agent["env"]
    longest = DEFAULT_TIMES.put + MAX_WAIT_SECONDS + STOP_SECONDS
    assert longest < spec["terminationGracePeriodSeconds"]


def test_without_the_switch_tolerations_are_as_they_were_said(kube: Kube) -> None:
    values = {"tolerations": [{"key": "gpu", "operator": "Exists"}]}
    assert pod(kube.template(values))["tolerations"] == values["tolerations"]


@pytest.mark.parametrize(
    ("topology", "mounted"),
    [({"publish": True}, True), ({"publish": False}, False), ({"publish": False, "volcano": True}, True)],
)
def test_kubelets_configuration_is_mounted_only_for_what_is_published(
    kube: Kube, topology: Document, mounted: bool
) -> None:
    """Not every distribution has the file, and a pod whose mount is missing does not start."""
    spec = pod(kube.template({"config": {"topology": topology}}))
    named = [volume["name"] for volume in spec["volumes"]]
    mounts = [mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]]
    assert ("kubelet-config" in named, "kubelet-config" in mounts) == (mounted, mounted)


def test_a_changed_configuration_restarts_the_agents_unless_told_otherwise(kube: Kube) -> None:
    def checksum(values: Document) -> str:
        metadata = named(kube.template(values), "DaemonSet")["spec"]["template"]["metadata"]
        return str(metadata.get("annotations", {}).get("checksum/config", ""))

    first, second = checksum({}), checksum({"config": {"rescanSeconds": 30}})
    assert first != second
    assert len(first) == hashlib.sha256().digest_size * 2
    assert checksum({"restartOnConfigChange": False}) == ""


def test_names_of_plugins_to_replace_reach_the_installer(kube: Kube) -> None:
    from agent.__main__ import _parser

    spec = pod(kube.template({"cni": {"replace": ["sriov", "rdma"], "force": True}}))
    options = _parser().parse_args(container(spec, "install-cni")["args"])
    assert (options.replace, options.force) == (("sriov", "rdma"), True)
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert tuple(schema["properties"]["cni"]["properties"]["replace"]["items"]["enum"]) == REPLACED


def test_configurations_of_replaced_device_plugins_reach_the_agent_as_they_are(kube: Kube) -> None:
    from agent.__main__ import _parser

    sriov = '{"resourceList": [{"resourceName": "vf", "selectors": {"vendors": ["15b3"]}}]}'
    shared = '{"configList": [{"resourceName": "hca", "rdmaHcaMax": 10, "selectors": {"linkTypes": ["ether"]}}]}'
    found = kube.template({"config": {"resources": []}, "replacedConfigs": {"sriov": sriov, "rdmaShared": shared}})
    texts = named(found, "ConfigMap")["data"]
    agent = container(pod(found), "agent")
    options = _parser().parse_args(agent["args"])
    assert texts[options.sriov_config.name] == sriov
    assert texts[options.rdma_shared_config.name] == shared
    (mounted,) = [m["mountPath"] for m in agent["volumeMounts"] if m["name"] == "config"]
    assert {str(options.sriov_config.parent), str(options.rdma_shared_config.parent)} == {mounted}
    assert (options.resource_prefix, options.use_cdi) == ("intel.com", False)


def test_arguments_of_replaced_device_plugins_reach_the_agent(kube: Kube) -> None:
    from agent.__main__ import _parser

    found = kube.template({"replacedConfigs": {"sriov": "{}", "resourcePrefix": "openshift.io", "useCdi": True}})
    agent = container(pod(found), "agent")
    options = _parser().parse_args(agent["args"])
    assert (options.resource_prefix, options.use_cdi) == ("openshift.io", True)
    (specs,) = [m for m in agent["volumeMounts"] if m["name"] == "cdi-dynamic"]
    assert specs["readOnly"] is False


def test_network_attachments_are_configurations_that_the_plugin_takes(kube: Kube) -> None:
    wanted = {"name": "rails", "namespace": "jobs", "resourceName": "rdma/vf", "config": {"vlan": 100, "mtu": 9000}}
    found = named(kube.template({"networkAttachments": [wanted]}), "NetworkAttachmentDefinition")
    assert found["metadata"]["namespace"] == "jobs"
    assert found["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/resourceName": "rdma/vf"}
    parsed = netconf.from_document(json.loads(found["spec"]["config"]))
    assert (parsed.settings.vlan, parsed.mtu) == (100, 9000)


def test_values_and_schema_name_the_same_keys() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(value: Any, described: Document, where: str) -> None:
        if described.get("additionalProperties") is not False:
            return
        assert set(value) == set(described["properties"]) - {"global"}, where
        for key in value.keys() - {"config"}:  # the agent's own, of which values.yaml has a part
            compare(value[key], described["properties"][key], f"{where}/{key}")

    compare(values, schema, "")


def test_alerts_and_dashboard_are_those_of_the_monitoring_folder(kube: Kube) -> None:
    found = kube.template(
        {"prometheusRule": {"enabled": True, "labels": {"release": "x"}}, "dashboard": {"enabled": True}}
    )
    rules = named(found, "PrometheusRule")
    assert rules["spec"] == documents(FOLDER / "monitoring/alerts.yaml")[0]
    assert rules["metadata"]["labels"]["release"] == "x"
    (dashboard,) = [d for d in found if d["metadata"]["name"] == "nodefabric-dashboard"]
    assert json.loads(dashboard["data"]["nodefabric.json"]) == json.loads(
        (FOLDER / "monitoring/dashboard.json").read_text()
    )
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_helm_upgrades_in_place_and_keeps_nothing_of_the_agent_when_it_removes(kube: Kube) -> None:
    installed = {identity(d) for d in kube.template()}
    removing = kube.template({"remove": True})
    assert {d["kind"] for d in removing} == {"DaemonSet"}
    assert not installed & {identity(d) for d in removing}
