from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agent.model.cloud_topology import Places
from agent.model.device import Problem, Snapshot
from agent.report.chart import (
    NEARNESS_UNKNOWN,
    as_document,
    as_text,
    rails,
    why_not_known,
)

Snapshots = Callable[[str], Snapshot]


def test_an_unknown_numa_node_is_a_dash(node_snapshot: Snapshots) -> None:
    assert as_text(node_snapshot("one-nic")).splitlines()[1] == "NIC0  X     -             -"
    assert as_document(node_snapshot("one-nic"))["devices"][0]["numa_node"] is None


def test_a_gpu_that_the_scan_does_not_show_is_a_question_mark(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("efa")
    gpus = tuple(replace(gpu, nvlinks=()) for gpu in snapshot.gpus)
    blind = replace(snapshot, devices=tuple(d for d in snapshot.devices if d.pci_class >> 16 != 0x03), gpus=gpus)
    assert rails(blind)[0][1] == ()
    assert as_text(blind).splitlines()[1].split()[:4] == ["GPU0", "X", "?", "?"]
    assert as_document(blind)["locality"]["GPU0"] == {}


def test_a_node_with_nothing_says_so() -> None:
    assert as_text(Snapshot()) == "This node has neither GPUs nor NICs."
    assert as_document(Snapshot()) == {"devices": [], "locality": {}, "nvlinks": {}, "nearest_nics": {}}


def test_devices_of_a_host_without_numa_are_on_one_node(node_snapshot: Snapshots) -> None:
    places = as_document(node_snapshot("one-numa-node"))["locality"]
    assert (places["GPU0"]["NIC0"], places["GPU1"]["NIC0"]) == ("PIX", "NODE")


def test_the_name_of_an_interface_forges_no_line(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("one-nic")
    (nic,) = (device for device in snapshot.devices if device.netdevs)
    forged = replace(nic, netdevs=(replace(nic.netdevs[0], name="x\nGPU9  0000:00:00.0"),))
    told = as_text(replace(snapshot, devices=tuple(forged if d is nic else d for d in snapshot.devices)))
    assert len(told.splitlines()) == len(as_text(snapshot).splitlines())
    assert "x\\nGPU9  0000:00:00.0" in told


def test_gpus_of_other_vendors_have_rows_their_links_and_the_nic_with_fewest_bridges_between(
    node_snapshot: Snapshots,
) -> None:
    snapshot = node_snapshot("mi250-8gpu")
    text = as_text(snapshot)
    assert "GPU0  X      XGMI4  XGMI1" in text
    assert "XGMI# over # xGMI links" in text
    assert "NV#" not in text
    assert "GPU2  PXB   NIC1" in text
    assert "PXB   several PCIe switches, or a GPU's own bridges; not the host bridge" in text
    assert as_document(snapshot)["nearest_nics"]["GPU2"] == ["NIC1"]


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


def test_a_table_of_the_host_is_named_and_where_nothing_is_known_it_says_so(node_snapshot: Snapshots) -> None:
    told = node_snapshot("azure-nd-h100")
    assert "told by Standard_ND96isr_H100_v5" in as_text(told)
    assert not why_not_known(told)
    flat = replace(told, places=Places())
    assert why_not_known(flat)
    assert NEARNESS_UNKNOWN in as_text(flat)
    assert not why_not_known(node_snapshot("epyc-no-switch")), "the PCI tree is the truth there"
    assert not why_not_known(node_snapshot("p5-8gpu-32efa"))
    assert not why_not_known(replace(node_snapshot("one-nic"), machine=told.machine)), "no GPU is near anything"


def test_a_nic_is_where_its_data_direct_function_is_and_where_that_is_not_known_it_says_so_and_why(
    node_snapshot: Snapshots,
) -> None:
    snapshot = node_snapshot("gb300-4gpu")
    assert "NIC0  0000:03:00.0  mlx5_0 enp3s0np0 (4 VFs)  towards GPUs where 0009:03:00.0 is" in as_text(snapshot)
    document = as_document(snapshot)
    assert document["nearest_nics"] == {"GPU0": ["NIC1"], "GPU1": ["NIC0"], "GPU2": ["NIC3"], "GPU3": ["NIC2"]}
    assert document["locality"]["GPU1"]["NIC0"] == "PXB"
    assert next(d for d in document["devices"] if d["label"] == "NIC0")["data_direct"] == "0009:03:00.0"
    assert not why_not_known(snapshot)

    ids = tuple(each for each in snapshot.adapter_ids if each[0] != "0009:03:00.0")
    problem = Problem("/sys/bus/pci/devices/0009:03:00.0/vpd", "cannot be read: Permission denied")
    unread = replace(snapshot, adapter_ids=ids, problems=(problem,))
    text, document = as_text(unread), as_document(unread)
    assert why_not_known(unread)
    assert "which GPUs 0000:03:00.0 stands beside is not known: /sys/bus/pci/devices/0009:03:00.0/vpd cannot" in text
    assert document["nearest_nics"] == {"GPU0": ["NIC1"], "GPU1": [], "GPU2": ["NIC3"], "GPU3": ["NIC2"]}
    assert "NIC0" not in document["locality"]["GPU1"]
    assert document["locality"]["NIC1"]["NIC0"] == "NODE", "to other NICs it is known"


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
