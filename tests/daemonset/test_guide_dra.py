"""What docs/dra.md says of claims: Kubernetes and the agent take its snippets, and its tables are the program's."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
import yaml

from agent import config
from agent.cluster.claim_objects import entry
from agent.config import Dra
from agent.config.sections import CLAIM_KEYS, SAFE_KEYS
from agent.hardware.lldp import Neighbour
from agent.model.allocation import Hold, NetworkData
from agent.model.health import Reason
from agent.offer.units import plain_offer
from deviceplugin.dra.allocated_claim import Opaque, Result
from deviceplugin.dra.attributes import Facts, StableFacts, stable_facts
from deviceplugin.dra.devices import devices_of
from deviceplugin.dra.parameters import settings_of
from tests.daemonset.manifests import REPOSITORY, Document, Kube, named
from tests.deviceplugin.dra.nodes import GPU_NODES, HCA, VF, Offered, recorded_node
from tests.documents import blocks, first_cells

GUIDE = REPOSITORY / "docs/dra.md"
VERSIONS = ("1.36", "1.37")


def documents_of(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def snippets() -> list[Document]:
    """Return the pieces of claims, each as the `devices` of a claim."""
    found = []
    for text in blocks(GUIDE, "yaml"):
        (document, *_) = documents_of(text)
        if "requests" in document:
            found.append(document)
        elif "exactly" in document:
            found.append({"requests": [{"name": "one", **document}]})
    return found


def quoted(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_values_are_sound_and_make_a_class_for_each_resource(kube: Kube) -> None:
    (text,) = [text for text in blocks(GUIDE, "yaml") if "\nconfig:\n" in text]
    found = kube.template(yaml.safe_load(text))
    parsed = config.parse(named(found, "ConfigMap")["data"]["config.yaml"], "docs/dra.md")
    assert {resource.binding for resource in parsed.claimable} == {"late"}
    made = {d["spec"]["extendedResourceName"] for d in found if d["kind"] == "DeviceClass"}
    assert made == {resource.name for resource in parsed.claimable}
    assert not parsed.topology.publish


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_what_is_shown_of_claims(version: str) -> None:
    (text,) = [text for text in blocks(GUIDE, "yaml") if text.startswith("apiVersion:")]
    found = documents_of(text)
    assert [document["kind"] for document in found] == ["ResourceClaimTemplate", "Pod"]
    assert len(snippets()) > 3
    claim = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "x"}}
    for document in (*found, *({**claim, "spec": {"devices": devices}} for devices in snippets())):
        kubernetes_validate.validate(document, version, strict=True)


def test_constraints_match_what_the_agent_publishes_by_default() -> None:
    matched = {each["matchAttribute"] for devices in snippets() for each in devices.get("constraints", ())}
    assert matched
    assert matched <= set(Dra().aliases)


def test_the_parameters_are_those_that_the_agent_reads() -> None:
    cells = first_cells(GUIDE, "key")
    assert set(quoted(cells)) < set(CLAIM_KEYS)
    assert quoted(cells[:-2]) == list(SAFE_KEYS)


def test_the_values_that_the_table_of_parameters_shows_are_taken() -> None:
    table = GUIDE.read_text().partition("| key | means |")[2].partition("\n\n")[0]
    shown = re.findall(r"`(?:(\w+): )?(\[.*?\])`", table)
    said: Document = {key or "addresses": yaml.safe_load(value) for key, value in shown}
    assert "addresses" in said
    parsed = config.parse(
        "{resources: [{name: rdma/vf, kind: vf, offer: dra, network: a}], networks: [{name: a}]}", "guide"
    )
    parameters = {"apiVersion": "nodefabric.io/v1alpha1", "kind": "Network", "ifName": "rail%d", **said}
    result = (Result("nic", parsed.dra.driver, "node", "vf"), parsed.resources[0])
    (setting,) = settings_of([Opaque(parameters)], [result], parsed)
    assert setting.network["ipam"]["addresses"] == [{"address": "192.0.2.10/24"}]


def test_reasons_of_the_table_are_the_programs() -> None:
    known = {reason.value for reason in Reason}
    listed = quoted(first_cells(GUIDE, "reason"))
    assert len(listed) == 11
    assert set(listed) <= known


def test_the_tables_of_attributes_have_all_that_is_published_and_no_other() -> None:
    published: set[str] = set()
    for name in GPU_NODES:
        for binding in ("early", "late"):
            made = Offered(recorded_node(name), [replace(each, binding=binding) for each in (VF, HCA)])
            offer = plain_offer(made.resources, made.snapshot)
            leaf = Neighbour("02:00:00:00:00:01", "Ethernet1", "leaf-1")
            leaves = {device.address: leaf for device in made.snapshot.devices}
            devices = devices_of(made.config, offer, Facts(stable_facts(offer, StableFacts()), leaves))
            published |= {key for device in devices for key in device.attributes}
    own = {name for name in published if "/" not in name}
    listed = set(quoted(first_cells(GUIDE, "attribute (`nodefabric.io/…`)")))
    assert own <= listed
    assert listed - own <= {"guid", "subnetPrefix"}  # of InfiniBand alone
    text = GUIDE.read_text()
    for other in published - own:
        assert f"`{other}`" in text or f"`…/{other.rpartition('/')[2]}`" in text, other


def test_the_status_is_what_the_agent_writes() -> None:
    (text,) = blocks(GUIDE, "json")
    (shown,) = json.loads(text)
    hold = Hold("vf", "rdma/vf", pool="gpu-7", device_name="vf-0000-18-00-1")
    network = NetworkData("rdma0", "02:00:00:00:01:00", ("192.168.100.2/24",))
    data = {"pciAddress": "0000:18:00.1", "rdmaDevice": "mlx5_8", "network": "rails"}
    written: Any = entry("nodefabric.io", hold, 0.0, network, data)
    for condition in written["conditions"]:
        del condition["lastTransitionTime"]
    assert shown == written
