"""The manifests for kustomize; that they are what the chart makes is seen in `test_kustomize.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.hardware import recorded
from agent.process.startup import check
from hack.sim.machine import SimulatedMachine
from tests.daemonset.manifests import BASE, CHART, FOLDER, base_config, documents

MANIFESTS = sorted(
    p for p in FOLDER.rglob("*.yaml") if {CHART, FOLDER / "monitoring", FOLDER / "examples"}.isdisjoint(p.parents)
)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: str(p.relative_to(FOLDER)))
def test_every_file_is_yaml_with_a_kind(path: Path) -> None:
    if path != BASE / "config.yaml":
        for document in documents(path):
            assert {"apiVersion", "kind"} <= set(document)


def test_the_kustomization_names_every_file_of_the_base_and_no_other() -> None:
    (document,) = documents(BASE / "kustomization.yaml")
    named = {*document["resources"], *document["configMapGenerator"][0]["files"], "kustomization.yaml"}
    assert named == {p.name for p in BASE.iterdir()}


@pytest.mark.parametrize("name", ["h100-8gpu", "flat-vm-4gpu", "efa", "ib-dual-port", "mi300x-8gpu", "one-nic"])
def test_the_config_is_accepted_on_every_kind_of_node(name: str, tmp_path: Path) -> None:
    SimulatedMachine.create(tmp_path / "node", recorded.load(recorded.find(name)), with_links=False)
    host = SimulatedMachine.open(tmp_path / "node")
    try:
        check(base_config(), host.scan())
    finally:
        host.close()
