"""The table of localities, the PCIe tree, and the drawing of it; see `golden.py` for how they look."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agent.model.cloud_topology import Places
from agent.model.device import NO_NUMA_NODE, PciDevice, Problem, Snapshot
from agent.report.chart import (
    NEARNESS_UNKNOWN,
    Branch,
    as_text,
    drawn,
    rows,
    tree,
    why_not_known,
)
from agent.report.svg import draw
from tests.node import pci

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


def nic(address: str, *path: str, numa: int = 0) -> PciDevice:
    return pci(address, path, numa)


def leaves(parts: Sequence[Branch]) -> Iterator[str]:
    for part in parts:
        yield from [part["device"]] if "device" in part else leaves(part["below"])


def test_every_nic_and_gpu_stands_in_the_tree_once_also_beside_its_data_direct_function(
    node_snapshot: Snapshots,
) -> None:
    for name in ("h100-8gpu", "gb200-4gpu", "gb300-4gpu", "efa", "ib-dual-port", "one-nic"):
        snapshot = node_snapshot(name)
        shown = list(leaves(json.loads(json.dumps(tree(snapshot)))))
        assert sorted(shown) == sorted(device.address for device in drawn(snapshot))
        assert set(shown) >= {*snapshot.data_direct.of, *snapshot.data_direct.of.values()}


def test_what_the_firmware_did_not_place_comes_last_and_a_neighbour_may_place_it() -> None:
    snapshot = Snapshot(
        (
            nic("0000:18:00.0", "pci0000:16", numa=NO_NUMA_NODE),
            nic("0000:28:00.0", "pci0000:26", numa=NO_NUMA_NODE),
            nic("0000:28:00.1", "pci0000:26", numa=3),
        )
    )
    placed, unplaced = tree(snapshot)
    assert placed["numaNode"] == 3
    below = [{"bridges": ["pci0000:16"], "below": [{"device": "0000:18:00.0"}]}]
    assert unplaced == {"numaNode": None, "cpus": "", "below": below}


def test_a_device_without_a_path_is_shown_all_the_same() -> None:
    bare = replace(nic("0000:18:00.0"), path=())
    assert list(leaves(tree(Snapshot((bare,))))) == ["0000:18:00.0"]
    assert tree(Snapshot()) == []


NODES = ("h100-8gpu", "gb200-4gpu", "efa", "ib-dual-port", "one-nic")
SVG = "{http://www.w3.org/2000/svg}"


def boxes(drawing: str) -> list[tuple[str, float, float, float, float]]:
    """List the rectangles: class, and left, top, right, bottom."""
    found = []
    for rect in ET.fromstring(drawing).iter(f"{SVG}rect"):
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        found.append((rect.attrib["class"], x, y, x + width, y + height))
    return found


@pytest.mark.parametrize("name", NODES)
def test_no_two_chips_overlap(node_snapshot: Snapshots, name: str) -> None:
    chips = [box for box in boxes(draw(node_snapshot(name), name)) if box[0] in ("gpu", "nic")]
    assert len(chips) == len(rows(node_snapshot(name)))
    for i, (_, left, top, right, bottom) in enumerate(chips):
        for _, x, y, x2, y2 in chips[:i]:
            assert x >= right or left >= x2 or y >= bottom or top >= y2


def test_names_from_outside_cannot_break_out(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    hostile = replace(snapshot, gpus=tuple(replace(gpu, name='<script>"&\x1b\x00\udc80') for gpu in snapshot.gpus))
    drawing = draw(hostile, '"><script>')
    assert not list(ET.fromstring(drawing).iter(f"{SVG}script"))
    assert "http" not in drawing.replace("http://www.w3.org/2000/svg", "")
