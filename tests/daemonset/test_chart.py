"""The chart, by real helm: what its values change, and that what it makes fits Kubernetes and the program."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from agent import config
from agent.__main__ import DEFAULT_CONFIG, _parser
from agent.cluster.apiserver import SERVICE_ACCOUNT
from agent.cluster.node_taint import DAEMON_SET, DEFAULT_TIMES, KEY
from agent.commands.run import STOP_SECONDS
from agent.config.networks import REPLACED
from agent.config.sections import MAX_WAIT_SECONDS
from agent.edits.cdi import SPEC_FOLDERS
from agent.hardware.netlink import configuring
from agent.operator import probe
from cni import netconf
from cni.install.commands import DEFAULT_CONFIGURATIONS, DEFAULT_TARGET
from tests.daemonset import golden
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
CASES: dict[str, Document] = {"nothing": {}, **SWITCHES, **golden.cases()}


def test_the_chart_stands_helms_own_examination(kube: Kube) -> None:
    done = kube.run("helm", "lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


@pytest.mark.parametrize("name", golden.cases())
def test_values_change_what_they_are_for_and_nothing_else(kube: Kube, name: str) -> None:
    assert golden.changes(kube, golden.cases()[name]) == golden.expected()[name]


def containers(spec: Document) -> Iterator[Document]:
    yield from (*spec["containers"], *spec.get("initContainers", ()))


@pytest.mark.parametrize("name", CASES)
def test_what_is_made_fits_kubernetes_and_the_program(kube: Kube, name: str) -> None:
    found = kube.template(CASES[name])
    has_claims = any(d["apiVersion"].startswith("resource.k8s.io/") for d in found)
    for version in (OLDEST_WITH_CLAIMS if has_claims else OLDEST, NEWEST):
        for document in found:
            if not document["apiVersion"].startswith(EXTENSIONS):
                assert kubernetes_validate.validate(document, version, strict=True).startswith(version)
    spec = pod(found)
    mounts = [mount["name"] for each in containers(spec) for mount in each.get("volumeMounts", ())]
    assert {*mounts} == {volume["name"] for volume in spec["volumes"]}
    for each in containers(spec):
        if "args" in each:
            _parser().parse_args(each["args"])
        assert each["securityContext"].get("privileged", False) is False
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert each["securityContext"]["capabilities"]["drop"] == ["ALL"]
    having = [
        c["name"] for c in containers(spec) for m in c.get("volumeMounts", ()) if m["mountPath"] == str(SERVICE_ACCOUNT)
    ]
    assert having in ([], ["agent"], ["uninstall"])
    assert spec["automountServiceAccountToken"] is False
    if not CASES[name].get("remove"):
        fits_its_configuration(found)


def fits_its_configuration(found: list[Document]) -> None:
    """Expect every path that the agent goes to at the same place of the host, for writing where it writes."""
    texts, agent, shown = named(found, "ConfigMap")["data"], container(pod(found), "agent"), host_paths(pod(found))
    options = _parser().parse_args(agent["args"])
    conf = config.parse(texts["config.yaml"], "chart")
    mounts = {mount["mountPath"].rstrip("/"): mount for mount in agent["volumeMounts"]}
    assert options.config == DEFAULT_CONFIG
    assert mounts[str(options.config.parent)]["name"] == "config"
    for file in (options.sriov_config, options.rdma_shared_config):
        assert file is None or (file.parent == DEFAULT_CONFIG.parent and file.name in texts)
    goes_to = [(conf.kubelet_dir / "device-plugins", True), (conf.kubelet_dir / "pod-resources", False)]
    goes_to += [
        (conf.state_dir, True),
        (conf.run_dir, True),
        *((p, False) for p in SPEC_FOLDERS[:1] if p != conf.cdi_dir),
    ]
    if conf.claimable:
        goes_to += [
            (conf.kubelet_dir / "plugins_registry", True),
            (conf.kubelet_dir / "plugins" / conf.dra.driver, True),
        ]
    if conf.claimable or (conf.cdi_names and any(resource.kind != "gpu" for resource in conf.resources)):
        goes_to.append((conf.cdi_dir, True))
    if conf.topology.publish or conf.topology.volcano:
        goes_to.append((conf.topology.kubelet_config, False))
    goes_to += [(p, False) for p in (conf.topology.kubelet_config_dir, *conf.netns_folders) if p and str(p) in mounts]
    goes_to += [(conf.runtime_socket.parent, False)] if conf.runtime_socket else []
    for path, writes in goes_to:
        mount = mounts[str(path)]
        assert shown[mount["name"]].rstrip("/") == str(path)
        assert mount.get("readOnly", False) is not writes, path


def test_the_configuration_of_the_base_keeps_its_comments(kube: Kube) -> None:
    rendered = config.parse(named(kube.template(), "ConfigMap")["data"]["config.yaml"], "chart")
    base = (FOLDER / "base/config.yaml").read_text()
    assert rendered == config.parse(base, "base")
    assert base.count("#") > 5


def test_what_chains_and_what_removes_work_on_the_same_paths_for_the_same_installation(kube: Kube) -> None:
    spec, removing = pod(kube.template({"cni": {"chain": True}})), pod(kube.template({"remove": True}))
    conf = config.parse(named(kube.template(), "ConfigMap")["data"]["config.yaml"], "chart")
    chain, install, remove = (
        container(spec, "cni-chain"),
        container(spec, "install-cni"),
        container(removing, "uninstall"),
    )
    options = _parser().parse_args(chain["args"])
    shown, mounts = host_paths(spec), {m["mountPath"]: m for m in chain["volumeMounts"]}
    for path, host_path in ((options.target, DEFAULT_TARGET), (options.conf_dir, DEFAULT_CONFIGURATIONS)):
        assert shown[mounts[str(path)]["name"]] == str(host_path)
        assert not mounts[str(path)].get("readOnly", False)
    assert (options.chain, options.watch, options.wait_for) == (True, True, conf.cni_socket)
    # The credentials of other plugins are in the folder that only this one sees.
    assert [c["name"] for c in spec["containers"] if "cni-config" in {m["name"] for m in c["volumeMounts"]}] == [
        "cni-chain"
    ]
    options = _parser().parse_args(remove["args"])
    assert (options.plugins, options.networks) == (DEFAULT_TARGET, DEFAULT_CONFIGURATIONS)
    assert [options.kubelet, options.state, options.run_dir] == [conf.kubelet_dir, conf.state_dir, conf.run_dir]
    assert (options.cdi, options.dra_driver) == (conf.cdi_dir, conf.dra.driver)
    (mount,) = remove["volumeMounts"]
    assert (mount["mountPath"], host_paths(removing)[mount["name"]]) == (str(options.root), "/")
    assert install["env"] == remove["env"] == chain["env"]
    assert install["env"][0]["name"] == "NODEFABRIC_INSTANCE"


def test_pods_see_no_processes_of_the_host_and_what_has_removed_all_waits_without_any_right(kube: Kube) -> None:
    removing = pod(kube.template({"remove": True}))
    assert not any(spec.get("hostPID", False) for spec in (pod(kube.template()), removing))
    assert container(removing, "done")["securityContext"] == {
        "runAsUser": 65534,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_an_update_starts_the_next_agent_beside_the_one_that_serves(kube: Kube) -> None:
    spec = pod(kube.template({"cni": {"chain": True}}))
    # With the host's network a named port is the node's: the scheduler would not place a second pod there.
    assert spec["hostNetwork"] is True
    assert not any(each.get("ports") for each in containers(spec))


def test_settings_of_ipv6_are_mounted_where_the_agent_looks_for_them(kube: Kube) -> None:
    mounts = container(pod(kube.template(SWITCHES["sysctls"])), "agent")["volumeMounts"]
    assert str(configuring.FILES[0]) in [mount["mountPath"] for mount in mounts]


def test_probes_ask_the_agents_own_socket_whatever_port_it_has(kube: Kube) -> None:
    agent = container(pod(kube.template({"config": {"endpoints": {"address": "0.0.0.0", "port": 9900}}})), "agent")
    for name, question in (("startupProbe", "healthz"), ("livenessProbe", "healthz"), ("readinessProbe", "readyz")):
        assert agent[name]["exec"] == {"command": ["nodefabric-probe", question]}
        assert agent[name]["timeoutSeconds"] > probe.SECONDS  # it tells itself that nobody answers
    (told,) = [entry["value"] for entry in agent["env"] if entry["name"] == probe.SOCKET]
    # Of the pod alone: a folder of the host's would be there for the agent of another pod too.
    assert Path(told).parent == Path("/dev/shm")
    assert not [mount for mount in agent["volumeMounts"] if mount["mountPath"].startswith("/dev")]


def test_an_agent_that_taints_its_node_has_the_time_to_do_so(kube: Kube) -> None:
    spec = pod(kube.template({"tolerations": [], "config": {"restart": {"taint": True}}}))
    assert spec["tolerations"] == [{"key": KEY, "operator": "Exists"}]
    assert DAEMON_SET in [entry["name"] for entry in container(spec, "agent")["env"]]
    assert DEFAULT_TIMES.put + MAX_WAIT_SECONDS + STOP_SECONDS < spec["terminationGracePeriodSeconds"]


def test_a_changed_configuration_restarts_the_agents(kube: Kube) -> None:
    def checksum(values: Document) -> str:
        annotations = named(kube.template(values), "DaemonSet")["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    first, second = checksum({}), checksum({"config": {"rescanSeconds": 30}})
    assert first != second
    assert len(first) == hashlib.sha256().digest_size * 2


def test_network_attachments_are_configurations_that_the_plugin_takes(kube: Kube) -> None:
    wanted = {"name": "rails", "namespace": "jobs", "resourceName": "rdma/vf", "config": {"vlan": 100, "mtu": 9000}}
    found = named(kube.template({"networkAttachments": [wanted]}), "NetworkAttachmentDefinition")
    assert found["metadata"]["namespace"] == "jobs"
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
    assert tuple(schema["properties"]["cni"]["properties"]["replace"]["items"]["enum"]) == REPLACED


def test_alerts_and_dashboard_are_those_of_the_monitoring_folder(kube: Kube) -> None:
    labels = {"release": "x"}
    found = kube.template({"prometheusRule": {"enabled": True, "labels": labels}, "dashboard": {"enabled": True}})
    rules = named(found, "PrometheusRule")
    assert rules["spec"] == documents(FOLDER / "monitoring/alerts.yaml")[0]
    assert rules["metadata"]["labels"]["release"] == "x"
    (dashboard,) = [d for d in found if d["metadata"]["name"] == "nodefabric-dashboard"]
    shown = json.loads(dashboard["data"]["nodefabric.json"])
    assert shown == json.loads((FOLDER / "monitoring/dashboard.json").read_text())
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_helm_upgrades_in_place_and_keeps_nothing_of_the_agent_when_it_removes(kube: Kube) -> None:
    installed = {identity(d) for d in kube.template()}
    removing = kube.template({"remove": True})
    assert {d["kind"] for d in removing} == {"DaemonSet"}
    assert not installed & {identity(d) for d in removing}
