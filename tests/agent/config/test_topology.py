from __future__ import annotations

from pathlib import Path

import pytest

from agent.config import Topology, parse
from agent.config.topology import LabelRule


def topology(text: str) -> Topology:
    return parse(f"topology:\n{text}", "test").topology


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
