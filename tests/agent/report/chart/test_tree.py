"""The PCIe tree of modelled nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from agent.model.device import NO_NUMA_NODE, PciDevice, Snapshot
from agent.report.chart import Bridge, Leaf, drawn, leaves, tree, tree_document
from tests.node import pci

Snapshots = Callable[[str], Snapshot]


def nic(address: str, *path: str, numa: int = 0) -> PciDevice:
    return pci(address, path, numa)


def test_a_gpu_and_its_nic_stand_below_one_switch(node_snapshot: Snapshots) -> None:
    first, second = tree(node_snapshot("h100-8gpu"))
    assert (first.number, first.cpus, second.number) == (0, "0-55,112-167", 1)
    assert first.below[0] == Bridge(
        ("pci0000:15", "0000:15:01.0", "0000:16:00.0"), (Leaf("0000:1b:00.0"), Leaf("0000:18:00.0"))
    )
    assert first.below[-1].names == ("pci0000:00", "0000:00:10.0")


def test_every_nic_and_gpu_stands_in_the_tree_once(node_snapshot: Snapshots) -> None:
    for name in ("h100-8gpu", "gb200-4gpu", "efa", "ib-dual-port", "one-nic"):
        snapshot = node_snapshot(name)
        shown = [address for group in tree(snapshot) for address in leaves(group.below)]
        assert sorted(shown) == sorted(device.address for device in drawn(snapshot))
        assert len(set(shown)) == len(shown)


def test_functions_of_one_port_stay_together() -> None:
    snapshot = Snapshot(tuple(nic(f"0000:18:00.{n}", "pci0000:16", "0000:16:02.0") for n in (0, 1)))
    (group,) = tree(snapshot)
    assert group.below == (Bridge(("pci0000:16", "0000:16:02.0"), (Leaf("0000:18:00.0"), Leaf("0000:18:00.1"))),)


def test_what_the_firmware_did_not_place_comes_last_and_a_neighbour_may_place_it() -> None:
    snapshot = Snapshot(
        (
            nic("0000:18:00.0", "pci0000:16", numa=NO_NUMA_NODE),
            nic("0000:28:00.0", "pci0000:26", numa=NO_NUMA_NODE),
            nic("0000:28:00.1", "pci0000:26", numa=3),
        )
    )
    assert [group.number for group in tree(snapshot)] == [3, NO_NUMA_NODE]
    assert tree_document(tree(snapshot))[1] == {
        "numaNode": None,
        "cpus": "",
        "below": [{"bridges": ["pci0000:16"], "below": [{"device": "0000:18:00.0"}]}],
    }


def test_a_device_without_a_path_is_shown_all_the_same() -> None:
    bare = replace(nic("0000:18:00.0"), path=())
    (group,) = tree(Snapshot((bare,)))
    assert list(leaves(group.below)) == ["0000:18:00.0"]


def test_a_node_without_devices_has_no_tree() -> None:
    assert tree(Snapshot()) == ()


def test_the_tree_can_be_written_as_json(node_snapshot: Snapshots) -> None:
    document = tree_document(tree(node_snapshot("h100-8gpu")))
    assert json.loads(json.dumps(document)) == document
