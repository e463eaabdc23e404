"""The PCIe tree of modelled nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from agent.model.device import NO_NUMA_NODE, PciDevice, Snapshot
from agent.report.chart import Branch, drawn, tree
from tests.node import pci

Snapshots = Callable[[str], Snapshot]


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
