"""The examples: Kubernetes takes them, their configurations offer what they ask for, and a modelled node has it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path

import kubernetes_validate
import pytest

from agent import config
from agent.config import Config
from agent.offer.explanation import cautions, explain_all, places_of, texts_at
from agent.offer.units import plain_offer
from agent.process.startup import check
from cni import netconf
from tests.daemonset.manifests import BASE, FOLDER, Document, documents
from tests.deviceplugin.dra.nodes import recorded_node

EXAMPLES = FOLDER / "examples"
CONFIGS = sorted(EXAMPLES.glob("config-*.yaml"))
NODES = {
    "config-vf.yaml": "h100-8gpu",
    "config-rail-networks.yaml": "h100-8gpu",
    "config-rails.yaml": "h100-8gpu",
    "config-bond.yaml": "dense-16x64",
    "config-ipvlan.yaml": "dense-16x64",
    "config-infiniband.yaml": "ib-dual-port",
    "config-roce.yaml": "h100-8gpu",
    "config-dpdk.yaml": "dense-16x64",
    "config-dra.yaml": "h100-8gpu",
}
ON_AMD = [("config-dra.yaml", node) for node in ("mi250-8gpu", "mi300x-8gpu")]
WITHOUT_DEVICES = {"config-infiniband.yaml": {"rdma/hca"}, "config-dpdk.yaml": {"intel.com/dpdk"}}
"""No modelled node has an adapter for these; their files say so."""
JOBS = sorted(p for p in EXAMPLES.glob("*.yaml") if p not in CONFIGS and p.name != "network-attachment.yaml")
BY_PLUGIN = [p for p in JOBS if "config-dra.yaml" not in p.read_text().splitlines()[0]]
"""The others are in `test_examples_dra.py`."""
OWN = re.compile(r"(rdma|intel\.com)/")


def pods(document: Document) -> Iterator[Document]:
    """List the specs of the pods that an object makes."""
    if document["kind"] == "Pod":
        yield document["spec"]
    elif document["apiVersion"] == "batch/v1":
        yield document["spec"]["template"]["spec"]
    elif document["apiVersion"].startswith("batch.volcano.sh/"):
        yield from (task["template"]["spec"] for task in document["spec"]["tasks"])


def configs_of(path: Path) -> list[Config]:
    """Read the configurations that an example names in its first line."""
    first = path.read_text().splitlines()[0]
    assert first.startswith("# Config: "), path.name
    names = re.findall(r"[\w./-]+\.yaml", first)
    assert names
    return [config.parse((EXAMPLES / name).resolve().read_text(), name) for name in names]


def extended(container: Document) -> dict[str, int]:
    limits = container.get("resources", {}).get("limits", {})
    return {name: int(count) for name, count in limits.items() if "/" in name}


@pytest.mark.parametrize(("name", "node"), [*((p.name, NODES[p.name]) for p in CONFIGS), *ON_AMD])
def test_a_configuration_is_sound_on_a_modelled_node_and_finds_its_devices(name: str, node: str) -> None:
    parsed, snapshot = config.parse((EXAMPLES / name).read_text(), name), recorded_node(node)
    check(parsed, snapshot)
    offer = plain_offer(parsed.resources, snapshot, named_rails=parsed.topology.rails)
    others = [r for r in parsed.resources if r.kind != "rail"]
    empty = {r.resource_name for r in explain_all(others, plain_offer(others, snapshot)).resources if not r.devices}
    assert empty == WITHOUT_DEVICES.get(name, set())
    assert not list(cautions(parsed, offer)) or name in WITHOUT_DEVICES


def test_the_rail_networks_fit_adapters_with_planes_with_the_changes_that_their_file_names() -> None:
    path = EXAMPLES / "config-rail-networks.yaml"
    text = path.read_text().partition("resources:")[2]
    for before, after in (("}.0.", "}.{plane*128}."), ("/16", "/17"), ('"rail{rail}"', '"rail{rail}p{plane}"')):
        assert before in text
        text = text.replace(before, after)
    parsed = config.parse("resources:" + text.replace("kind: vf", "kind: nic"), path.name)  # the model has no VFs
    snapshot = recorded_node("gb200-cx8-4gpu")
    check(parsed, snapshot)
    (network,) = parsed.networks
    offer = plain_offer(parsed.resources, snapshot)
    found = [dict(texts_at(network, place)) for place in places_of(network, parsed, offer)]
    assert sorted(str(values["ifName"]) for values in found) == [f"rail{r}p{p}" for r in range(4) for p in range(2)]
    for values in found:
        gateway, subnet = ip_address(values["gateway"]), ip_network(values["ipam.range"])
        assert gateway in subnet
        assert gateway in ip_network(values["ipam.exclude[0]"])
        assert ip_address(values["routes[0].gw"]) == gateway


@pytest.mark.parametrize("path", BY_PLUGIN, ids=lambda p: p.name)
def test_what_an_example_asks_for_is_offered_by_the_configurations_it_names(path: Path) -> None:
    asked = {name for d in documents(path) for spec in pods(d) for c in spec["containers"] for name in extended(c)}
    assert asked
    for parsed in configs_of(path):
        assert asked <= {resource.name for resource in parsed.resources}, parsed.source


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.name)
def test_kubernetes_takes_the_example(path: Path) -> None:
    found = documents(path)
    assert any([*pods(document)] for document in found)
    for document in found:
        if not document["apiVersion"].startswith("batch.volcano.sh/"):
            kubernetes_validate.validate(document, "1.37", strict=True)
        for spec in pods(document):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
            kubernetes_validate.validate(pod, "1.37", strict=True)


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.name)
def test_who_pins_memory_may_do_so(path: Path) -> None:
    for document in documents(path):
        for spec in pods(document):
            for container in spec["containers"]:
                added = container.get("securityContext", {}).get("capabilities", {}).get("add", [])
                needs = any(OWN.match(name) and name != "rdma/ipoib" for name in extended(container))
                if path not in BY_PLUGIN:
                    needs = bool(container.get("resources"))
                assert ("IPC_LOCK" in added) is needs, (path.name, container["name"])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("volcano-*.yaml")), ids=lambda p: p.name)
def test_a_gang_starts_whole_or_not_at_all(path: Path) -> None:
    (job,) = documents(path)
    assert job["apiVersion"] == "batch.volcano.sh/v1alpha1"
    assert job["spec"]["schedulerName"] == "volcano"
    assert job["spec"]["minAvailable"] == sum(task["replicas"] for task in job["spec"]["tasks"])
    (worker,) = [t for t in job["spec"]["tasks"] if t["name"] == "worker"]
    (launcher,) = [t for t in job["spec"]["tasks"] if t["name"] == "launcher"]
    (ranks,) = re.findall(r" -np (\d+) ", launcher["template"]["spec"]["containers"][0]["args"][0])
    (container,) = worker["template"]["spec"]["containers"]
    assert int(ranks) == worker["replicas"] * container["resources"]["limits"]["cpu"]


@pytest.mark.parametrize("name", ["pytorch-rails", "pytorch-late", "pytorch-dra"])
def test_pytorch_starts_a_process_for_each_gpu_on_as_many_nodes_as_there_are_pods(name: str) -> None:
    *templates, service, job = documents(EXAMPLES / f"{name}.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (command,) = container["args"]
    (nodes,), (processes,) = re.findall(r"--nnodes (\d+)", command), re.findall(r"--nproc-per-node (\d+)", command)
    assert int(nodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    claimed = [request["exactly"]["count"] for d in templates for request in d["spec"]["spec"]["devices"]["requests"]]
    assert {*extended(container).values(), *claimed} == {int(processes)}
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    subdomain = job["spec"]["template"]["spec"]["subdomain"]
    assert f"--master-addr {name}-0.{subdomain} " in command
    assert subdomain == service["metadata"]["name"]


def test_the_pod_with_a_bond_asks_for_the_two_vfs_that_its_network_joins() -> None:
    (parsed,) = configs_of(EXAMPLES / "pod-bond.yaml")
    (resource,) = parsed.resources
    assert resource.bonded
    (pod,) = documents(EXAMPLES / "pod-bond.yaml")
    assert [extended(c) for c in pod["spec"]["containers"]] == [{resource.name: 2}]


def test_the_dpdk_pod_has_whole_cpus_huge_pages_and_the_variable_that_the_agent_sets() -> None:
    (pod,) = documents(EXAMPLES / "pod-dpdk.yaml")
    (container,) = pod["spec"]["containers"]
    limits = container["resources"]["limits"]
    (resource,) = extended(container)
    assert isinstance(limits["cpu"], int)
    assert "$PCIDEVICE_" + re.sub(r"[^A-Z0-9]", "_", resource.upper()) in container["args"][0]
    (volume,) = pod["spec"]["volumes"]
    assert f"hugepages-{volume['emptyDir']['medium'].removeprefix('HugePages-')}" in limits


def test_the_example_networks_are_understood_by_the_plugin() -> None:
    chain = json.loads((EXAMPLES / "cluster.conflist").read_text())
    ours = [{"name": chain["name"], "cniVersion": chain["cniVersion"], **p} for p in chain["plugins"]][-1]
    assert ours["type"] == "nodefabric"
    netconf.from_document(ours)
    (attachment,) = documents(EXAMPLES / "network-attachment.yaml")
    parsed = netconf.from_document(json.loads(attachment["spec"]["config"]))
    assert (parsed.settings.vlan, parsed.settings.trust, parsed.mtu) == (100, True, 9000)
    resource_name = attachment["metadata"]["annotations"]["k8s.v1.cni.cncf.io/resourceName"]
    base = config.parse((BASE / "config.yaml").read_text(), "base")
    assert resource_name in {resource.name for resource in base.resources}


def test_the_table_of_examples_has_all_of_them() -> None:
    listed = set(re.findall(r"\]\(([\w.-]+)\)", (EXAMPLES / "README.md").read_text()))
    there = {p.name for p in EXAMPLES.iterdir() if p.suffix in (".yaml", ".conflist")}
    assert listed == there - {p.name for p in CONFIGS}
