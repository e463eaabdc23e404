from __future__ import annotations

from pathlib import Path

import pytest

from agent.config import Topology, parse
from agent.config.topology import LabelRule
from agent.errors import ConfigError


def topology(text: str) -> Topology:
    return parse(f"topology:\n{text}", "test").topology


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        topology(text)
    return caught.value.problems


def test_by_default_nothing_goes_to_the_cluster() -> None:
    found = parse("", "test").topology
    assert not found.needs_api
    assert not found.watches_pods
    assert found.bandwidth.sample_seconds == 15


def test_labels_come_from_facts_by_name_or_with_what_they_need() -> None:
    found = topology("""
  labels:
    to: nfd
    keys:
      example.com/rails: rails
      volcano.sh/tor: leaf-switch
      example.com/leaf.{nic}: leaf-switch
      example.com/rack: {fact: node-name, pattern: "(r[0-9]+)-"}
      example.com/row: {fact: file, path: /etc/row}
      example.com/site: {fact: text, text: ams1}
""")
    assert found.labels.keys == (
        LabelRule("example.com/rails", "rails"),
        LabelRule("volcano.sh/tor", "leaf-switch"),
        LabelRule("example.com/leaf.{nic}", "leaf-switch"),
        LabelRule("example.com/rack", "node-name", pattern="(r[0-9]+)-"),
        LabelRule("example.com/row", "file", path=Path("/etc/row")),
        LabelRule("example.com/site", "text", text="ams1"),
    )
    assert found.labels.need_lldp
    assert not found.needs_api


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("  labels: {keys: [a]}", "topology.labels.keys: must be a mapping"),
        ("  labels: {keys: {rails: rails}}", "topology.labels.keys: a label key must be domain/name"),
        ("  labels: {keys: {1: rails}}", "topology.labels.keys: a label key must be domain/name"),
        ("  labels: {keys: {a.b/c: nonsense}}", 'topology.labels.keys."a.b/c": must be one of rails'),
        ("  labels: {keys: {a.b/c: node-guid}}", 'topology.labels.keys."a.b/c": node-guid is told for each NIC'),
        ("  labels: {keys: {'a.b/c-{nic}': rails}}", '-{nic}": rails is not told for each NIC'),
        ("  labels: {keys: {'a.b/c-{rail}': rails}}", '-{rail}": rails is not told for each NIC: leave {rail} out'),
        ("  labels: {keys: {'a.b/c-{plane}': leaf-switch}}", '-{plane}": {plane} in the key needs {rail}, as in'),
        ("  labels: {keys: {'a.b/c-{vf}': leaf-switch}}", "must be domain/name, perhaps with {nic}, or {rail} and {pl"),
        ("  labels: {keys: {a.b/c: {fact: text}}}", 'topology.labels.keys."a.b/c".text: is missing'),
        ("  labels: {keys: {a.b/c: {fact: rails, path: /x}}}", "path: is for fact file only"),
        ("  labels: {keys: {a.b/c: {path: /x}}}", 'keys."a.b/c".fact: is missing'),
        ("  labels: {keys: {a.b/c: {fact: rails, pattern: '('}}}", "pattern: must be a regular expression with one"),
        ("  labels: {keys: {a.b/c: {fact: rails, pattern: 'x'}}}", "pattern: must be a regular expression with one"),
        (
            "  labels: {keys: {a.b/c: {fact: rails, pattern: '(x{99999999999})'}}}",
            "pattern: must be a regular expression with one",
        ),
        ("  labels: {to: both}", "topology.labels.to: must be one of node, nfd"),
        (
            "  rails: [ens1, '0000:3B:00.0', '0000:3b:00.0']",
            "topology.rails[2]: 0000:3b:00.0 is rail 1 already: name each adapter once",
        ),
        ("  rails: [[ens1, ens2], [ens3, ens2]]", "topology.rails[1]: ens2 is rail 0 already: name each adapter once"),
        ("  rails: [ens1, []]", "topology.rails[1]: must be the interface or the PCI address of an adapter, or a list"),
        (
            "  rails: [[ens1, 2]]",
            "topology.rails[0]: must be the interface or the PCI address of an adapter, or a list",
        ),
        ("  lldpNetdevs: [a/b]", "topology.lldpNetdevs[0]: must be an interface name"),
        ("  fingerprint: {pods: some}", "topology.fingerprint.pods: must be one of dedicated, shared, podresources"),
        (
            "  fingerprint: {pods: podresources, method: with-exclusive-resources}",
            "topology.fingerprint.method: must be all with pods: podresources",
        ),
        ("  bandwidth: {annotation: load}", "topology.bandwidth.annotation: must be domain/name"),
        ("  bandwidth: {annotation: a.b/c, sampleSeconds: 0}", "topology.bandwidth.annotation: needs sampleSeconds"),
        ("  bandwidth: {every: 3}", "topology.bandwidth.every: is not a known key"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_place(text: str, problem: str) -> None:
    found = problems(text)
    assert any(problem in each for each in found), found


@pytest.mark.parametrize(
    ("text", "api", "watch"),
    [
        ("  publish: true", True, True),
        ("  publish: true\n  fingerprint: {pods: podresources}", True, False),
        ("  publish: true\n  fingerprint: {pods: shared}", True, True),
        ("  publish: true\n  fingerprint: {method: with-exclusive-resources}", True, True),
        ("  volcano: true", True, False),
        ("  labels: {keys: {a.b/c: rails}}", True, False),
        ("  labels: {to: nfd, keys: {a.b/c: rails}}", False, False),
        ("  bandwidth: {annotation: a.b/c}", True, False),
    ],
)
def test_what_needs_the_api_server_or_a_watch_of_pods_follows_from_what_is_on(
    text: str, api: bool, watch: bool
) -> None:
    found = topology(text)
    assert (found.needs_api, found.watches_pods) == (api, watch)
