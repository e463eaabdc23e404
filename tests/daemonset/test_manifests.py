"""The manifests for kustomize; that they are what the chart makes is seen in `test_kustomize.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.hardware import recorded
from agent.process.startup import check
from hack.sim.machine import SimulatedMachine
from tests.daemonset.manifests import base_config


@pytest.mark.parametrize("name", ["h100-8gpu", "flat-vm-4gpu", "efa", "ib-dual-port", "mi300x-8gpu", "one-nic"])
def test_the_config_is_accepted_on_every_kind_of_node(name: str, tmp_path: Path) -> None:
    SimulatedMachine.create(tmp_path / "node", recorded.load(recorded.find(name)), with_links=False)
    host = SimulatedMachine.open(tmp_path / "node")
    try:
        check(base_config(), host.scan())
    finally:
        host.close()
