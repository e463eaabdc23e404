from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agent.model.cloud_topology import Places
from agent.model.device import Problem, Snapshot
from agent.report.chart import (
    NEARNESS_UNKNOWN,
    as_text,
    why_not_known,
)

Snapshots = Callable[[str], Snapshot]


def test_the_name_of_an_interface_forges_no_line(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("one-nic")
    (nic,) = (device for device in snapshot.devices if device.netdevs)
    forged = replace(nic, netdevs=(replace(nic.netdevs[0], name="x\nGPU9  0000:00:00.0"),))
    told = as_text(replace(snapshot, devices=tuple(forged if d is nic else d for d in snapshot.devices)))
    assert len(told.splitlines()) == len(as_text(snapshot).splitlines())
    assert "x\\nGPU9  0000:00:00.0" in told


@pytest.mark.parametrize("machine", ["", "Supermicro SYS-821GE", "SeaBIOS"])
def test_without_a_bridge_above_any_gpu_or_nic_nearness_is_not_known_whatever_the_machine_is_called(
    node_snapshot: Snapshots, machine: str
) -> None:
    flat = replace(node_snapshot("azure-nd-h100"), places=Places(), machine=machine)
    assert why_not_known(flat)
    assert NEARNESS_UNKNOWN in as_text(flat)
    gpus = {gpu.pci_address for gpu in flat.gpus}
    below_ports = tuple(
        replace(d, path=(d.path[0], f"port above {d.address}", d.address)) if d.address in gpus else d
        for d in flat.devices
    )
    assert not why_not_known(replace(flat, devices=below_ports)), "the PCI tree shows where the GPUs are"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"adapter_ids": (), "adapter_ids_due": True}, "vital product data is still being read"),
        ({"adapter_ids": (("0000:03:00.0", "a"), ("0009:03:00.0", "b"))}, "no PF belongs to the Data Direct function"),
        (
            {"adapter_ids": (), "problems": tuple(Problem(f"/{number}/vpd", "cannot be read") for number in range(9))},
            ": /0/vpd cannot be read (the first of 9 such functions)",
        ),
    ],
)
def test_the_cause_is_named(node_snapshot: Snapshots, change: dict[str, Any], cause: str) -> None:
    found = why_not_known(replace(node_snapshot("gb300-4gpu"), **change))
    assert found is not None
    assert cause in found[0]
