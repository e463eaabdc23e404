"""Each modelled node must be as a kernel would show it: links resolve, both ends agree, numbers are unique."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.hardware import recorded
from agent.model.device import Snapshot, is_pci_address

Root = Callable[[str], Path]
Snapshots = Callable[[str], Snapshot]

pytestmark = pytest.mark.parametrize("name", recorded.names())


def links(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        for entry in (*folders, *files):
            if os.path.islink(path := os.path.join(folder, entry)):
                yield path


def functions(root: Path) -> dict[str, Path]:
    """Real folders of all PCI functions, bridges too."""
    return {p.name: p.resolve() for p in (root / "sys/bus/pci/devices").iterdir()}


def number(path: Path, base: int = 10) -> int:
    return int(path.read_text(), base)


def test_every_link_resolves(name: str, node_root: Root) -> None:
    assert [link for link in links(node_root(name)) if not os.path.exists(link)] == []


def test_every_pci_folder_is_listed_and_hangs_on_a_bridge(name: str, node_root: Root) -> None:
    root = node_root(name).resolve()
    listed = functions(root)
    there = {f: Path(d) / f for d, folders, _ in os.walk(root / "sys/devices") for f in folders if is_pci_address(f)}
    assert listed == there
    for address, folder in listed.items():
        assert (folder / "class").read_text().startswith("0x")
        above = folder.parent.name
        if above.startswith("pci"):
            assert address.startswith(above.removeprefix("pci"))
        else:
            assert (listed[above] / "class").read_text() == "0x060400\n"
            assert address[:7] != above[:7], "a bridge's other side is another bus"


def test_pfs_and_vfs_agree(name: str, node_root: Root) -> None:
    listed = functions(node_root(name))
    found = set()
    for pf, folder in listed.items():
        virtual = sorted(folder.glob("virtfn*"), key=lambda p: int(p.name.removeprefix("virtfn")))
        if not (folder / "sriov_totalvfs").exists():
            assert virtual == []
            continue
        assert len(virtual) == number(folder / "sriov_numvfs") <= number(folder / "sriov_totalvfs")
        first = routing_id(pf) + number(folder / "sriov_offset")
        stride = number(folder / "sriov_stride")
        for index, link in enumerate(virtual):
            vf = link.resolve()
            assert link.name == f"virtfn{index}"
            assert (vf / "physfn").resolve() == folder
            assert routing_id(vf.name) == first + index * stride
            assert number(vf / "device", 16) == int((folder / "sriov_vf_device").read_text(), 16)
            assert (vf / "numa_node").read_text() == (folder / "numa_node").read_text()
            found.add(vf.name)
    assert found == {address for address, folder in listed.items() if (folder / "physfn").exists()}


def routing_id(address: str) -> int:
    _, bus, rest = address.split(":")
    device, function = rest.split(".")
    return (int(bus, 16) << 8) | (int(device, 16) << 3) | int(function)


@pytest.mark.parametrize("family", ["net", "infiniband", "infiniband_verbs", "infiniband_mad"])
def test_class_entries_and_device_folders_agree(name: str, family: str, node_root: Root) -> None:
    root = node_root(name).resolve()
    listed = root / "sys/class" / family
    classed = {p.name: p.resolve() for p in listed.iterdir()} if listed.exists() else {}
    there = {p.name: p for folder in functions(root).values() for p in folder.glob(f"{family}/*")}
    assert classed == there
    for folder in there.values():
        assert (folder / "device").resolve() == folder.parent.parent


def test_the_scan_has_nothing_to_complain_about(name: str, node_snapshot: Snapshots) -> None:
    assert node_snapshot(name).problems == ()
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", node_snapshot(name).boot_id)
