"""The configuration file: what is read from it. What is said about wrong ones: `test_wrong_documents.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent import config
from agent.config import CniSettings, Config, Resource
from agent.config.files import Sources
from agent.config.networks import FOREIGN, network_of_keys
from agent.config.resources import RailNic
from agent.config.sections import CLAIM_KEYS
from agent.errors import RequestInvalid
from agent.offer.units import plain_offer
from tests.node import node

EVERY_KEY = yaml.safe_load(Path(__file__).with_name("every_key.yaml").read_text())


@pytest.mark.parametrize("case", EVERY_KEY, ids=lambda case: case["about"])
def test_every_key_is_read(case: dict[str, Any]) -> None:
    found = json.loads(config.describe(config.parse(case["config"], "test")))
    assert {key: found[key] for key in case["in effect"]} == case["in effect"]


@pytest.mark.parametrize("text", ["", "{}", "# nothing\n", "---\n", "null"])
def test_an_empty_document_means_the_defaults(text: str) -> None:
    assert config.parse(text, "empty.yaml") == Config()


def test_json_is_read_as_the_yaml_that_it_is() -> None:
    document = {
        "resources": [{"name": "rdma/hca", "kind": "hca", "network": "pods"}],
        "networks": [{"name": "pods", "mode": "macvlan"}],
    }
    assert config.parse(json.dumps(document), "file") == config.parse(yaml.safe_dump(document), "file")


@pytest.mark.parametrize(
    "text",
    [
        *(f"endpoints: {{port: {port}}}" for port in (0, 65535)),
        *(f"topology: {{heartbeatSeconds: {seconds}}}" for seconds in (10, 86400)),
        *(f"rescanSeconds: {seconds}" for seconds in (1, 3600)),
        *(f"stateDir: {path}" for path in ("/", "/a/b..c/..d", "/var/lib/node fabric")),
        *(f"dra: {{driver: {driver}}}" for driver in ("a", "x1.y-2.z", f"{'a' * 59}.com")),
        *(f"resources: [{{name: a/b, kind: rail, nic: {{kind: hca, count: {count}}}}}]" for count in (1, 64, "planes")),
        "resources: [{name: a/b, kind: hca, binding: late, offer: dra}]",
        "resources: [{name: a/b, kind: hca, binding: late, shares: 1}]",
        "resources: [{name: a/b, kind: vf, offer: dra, environment: [ucx]}, {name: a/c, kind: vf, environment: [ucx]}]",
        f"resources: [{{name: a.example/{'x' * 54}, kind: vf, offer: dra}}]",
        f"resources: [{{name: a.example/{'x' * 55}, kind: vf}}]",
        "resources: [{name: a/b, kind: hca, network: n}]\nnetworks: [{name: n, mode: ipoib}]",
        "networks: [{name: n, rdma: true}]\nresources: [{name: a/b, kind: vf, network: n, select: {drivers: [x]}}]",
        # What each of the rails or NUMA nodes can use, eight where no list says it.
        "networks: [{name: n, ifName: 'r{rail}', vlan: '{rail*500}'}]",
        *(
            f"{{networks: [{{name: n, ipam: {{type: {kind}, {keys}}}}}], topology: {{rails: {rails}}}}}"
            for kind, keys, rails in (
                ("host-local", "subnet: '10.{rail}.0.0/16', gateway: 10.0.0.1", "[]"),
                ("whereabouts", "range: '10.0.{rail}.5-10.0.{rail}.9/16'", "[]"),
                ("host-local", "subnet: '10.{numa}.0.0/16'", "[]"),
                ("host-local", "subnet: '10.0.{rail*64}.0/18'", "[a, b, c, d]"),
                ("host-local", "subnet: '10.{rail}.{plane*128}.0/17'", "[[a, b], [c]]"),
            )
        ),
    ],
)
def test_what_may_be_said_is_read(text: str) -> None:
    config.parse(text, "test.yaml")


def test_errors_of_gpus_are_ignored_or_fatal_by_number_or_all_at_once() -> None:
    health = config.parse("health: {ignoredXids: [all], fatalXids: [48, 79]}", "test").health
    assert [health.gpu_policy.classify(xid).value for xid in (48, 74, 13)] == ["fatal", "application", "application"]


@pytest.mark.parametrize("name", ["rail1", "0000:22:00.0"])
def test_a_protected_adapter_is_left_out_of_what_resources_take_and_its_vfs_are_not(name: str) -> None:
    snapshot = node(rails=2, vfs=2)
    resources = (
        Resource("rdma/hca", "hca", shares=1),
        Resource("rdma/vf", "vf"),
        Resource("rdma/rail", "rail", nic=RailNic("hca", shares=1)),
    )
    for resource in resources:
        free = plain_offer([resource], snapshot).offered[resource.name]
        (kept,) = Config(resources=(resource,), cni=CniSettings(protect=(name,))).resources
        left = plain_offer([kept], snapshot).offered[resource.name]
        assert any(unit.device == "0000:22:00.0" for unit in free) is (resource.kind != "vf")
        assert all(unit.device != "0000:22:00.0" for unit in left)
        if resource.kind == "vf":
            assert left == free


def test_what_is_protected_is_so_for_other_plugins_files_too(tmp_path: Path) -> None:
    own, shared = tmp_path / "config.yaml", tmp_path / "shared.json"
    own.write_text("cni: {protect: [rail1]}")
    shared.write_text('{"configList": [{"resourceName": "hca", "rdmaHcaMax": 4, "selectors": {"vendors": ["15b3"]}}]}')
    (pool,) = Sources(own, shared=shared).load().resources
    snapshot = node(rails=2, vfs=0)
    rdma = {d.address: {r.name for r in d.rdma_devices} for d in snapshot.devices if d.rdma_devices}
    (first, *_) = plain_offer([pool], snapshot).offered[pool.name]
    assert set(first.rdma_devices) == set().union(*rdma.values()) - rdma["0000:22:00.0"]


@pytest.mark.parametrize(
    ("text", "api", "of_topology", "watch"),
    [
        ("{}", False, False, False),
        ("topology: {publish: true}", True, True, True),
        ("topology: {publish: true, fingerprint: {pods: podresources}}", True, True, False),
        ("topology: {publish: true, fingerprint: {pods: shared}}", True, True, True),
        ("topology: {publish: true, fingerprint: {method: with-exclusive-resources}}", True, True, True),
        ("topology: {volcano: true}", True, True, False),
        ("topology: {labels: {keys: {a.b/c: rails}}}", True, True, False),
        ("topology: {bandwidth: {annotation: a.b/c}}", True, True, False),
        ("restart: {taint: true}", True, False, False),
        ("resources: [{name: a/b, kind: vf, offer: dra}, {name: a/c, kind: hca}]", True, False, False),
    ],
)
def test_what_needs_the_api_server_or_a_watch_of_pods_follows_from_what_is_on(
    text: str, api: bool, of_topology: bool, watch: bool
) -> None:
    found = config.parse(text, "test")
    assert (found.needs_api, found.topology.needs_api, found.topology.watches_pods) == (api, of_topology, watch)
    assert [each.name for each in found.claimable] == [each.name for each in found.resources if each.name == "a/b"]


def test_a_claim_may_say_what_networks_can_say_and_nothing_else() -> None:
    with pytest.raises(RequestInvalid) as refused:
        network_of_keys({"name": "a", "unknown": 1})
    [known] = re.findall("known are: (.*)", str(refused.value))
    # What a resource joins is told before there is a claim.
    of_no_claim = {"type", "cniVersion", "pf", "bond", "arpTargets", *FOREIGN}
    keys_of_networks = set(known.split(", ")) - of_no_claim
    assert keys_of_networks - {"ifName"} == set(CLAIM_KEYS) - {"ifName"} - {"addresses", "network"}


@pytest.mark.parametrize(
    "text", ["", "#", "x#", "x#a", "x#1-", "x#-1", "x#2-1", "x#65536", "x#1,,2", "a b", "a/b", "..", "x#\uff11"]
)
def test_a_pf_selector_that_is_wrong_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^"):
        config.parse_pf(text)
