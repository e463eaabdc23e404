from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import HardwareError
from agent.hardware import recorded
from agent.hardware.sysfs.scan import rescan, scan
from agent.model.change import of_function
from agent.model.device import Snapshot
from hack.node_tree import Ids, NodeTree
from tests import descriptors

Root = Callable[[str], Path]
Snapshots = Callable[[str], Snapshot]
NIC = Ids("020000", "8086", "10d3", driver="e1000e")
FACTS = Path(__file__).with_name("facts.json")


def laid_out(name: str, folder: Path) -> Path:
    """Lay out a node that a test may change."""
    folder.mkdir(exist_ok=True)
    recorded.unpack(recorded.load(recorded.find(name)), folder)
    return folder


def built(tree: NodeTree, folder: Path) -> Path:
    recorded.unpack(recorded.parse(tree.document(), "test"), folder)
    return folder


def problems(snapshot: Snapshot) -> dict[str, str]:
    return {p.path: p.text for p in snapshot.problems}


def test_an_empty_root_has_nothing_and_no_problems(tmp_path: Path) -> None:
    assert scan(tmp_path) == Snapshot()


@pytest.mark.parametrize("name", recorded.names())
def test_a_modelled_node_is_scanned_without_a_problem(name: str, node_snapshot: Snapshots) -> None:
    assert node_snapshot(name).problems == ()
    assert UUID(node_snapshot(name).boot_id)


@pytest.mark.parametrize(("name", "address"), [("h100-8gpu", "0000:18:00.0"), ("ib-dual-port", "0000:03:00.0")])
def test_a_function_and_a_numa_node_are_read_with_all_their_facts(
    node_snapshot: Snapshots, name: str, address: str
) -> None:
    snapshot = node_snapshot(name)
    found = {"function": asdict(snapshot.by_address[address]), "numa_node": asdict(snapshot.numa_nodes[0])}
    assert json.loads(json.dumps(found, default=str)) == json.loads(FACTS.read_text())[name]


def test_an_interface_below_a_virtio_device_belongs_to_the_pci_function(tmp_path: Path) -> None:
    tree = NodeTree("virtio", "")
    tree.pci("pci0000:00", "0000:00:03.0", Ids("020000", "1af4", "1041", driver="virtio-pci"), -1)
    folder = "/sys/devices/pci0000:00/0000:00:03.0/virtio2/net/eth0"
    tree.files(folder, address="02:fc:00:00:00:01", carrier=1, ifindex=4, mtu=1400, operstate="up", speed=-1, type=1)
    tree.link("/sys/class/net/eth0", folder)
    (device,) = scan(built(tree, tmp_path)).devices
    assert device.netdev is not None
    assert (device.netdev.name, device.netdev.speed_mbps) == ("eth0", None)


@pytest.mark.parametrize("how", ["parent", "ndevs"])
def test_software_rdma_belongs_to_the_function_of_its_interface(tmp_path: Path, how: str) -> None:
    tree = NodeTree("rxe", "")
    tree.pci("pci0000:00", "0000:00:03.0", NIC, -1)
    tree.netdev("0000:00:03.0", "eth0", "02:fc:00:00:00:01", up=True)
    rxe = "/sys/devices/virtual/infiniband/rxe0"
    tree.files(rxe, node_type="1: CA", node_guid="0000:0000:0000:0001")
    tree.files(f"{rxe}/ports/1", state="4: ACTIVE", phys_state="5: LinkUp", link_layer="Ethernet")
    tree.file(f"{rxe}/parent" if how == "parent" else f"{rxe}/ports/1/gid_attrs/ndevs/0", "eth0")
    tree.link("/sys/class/infiniband/rxe0", rxe)
    tree.files("/sys/devices/virtual/infiniband_verbs/uverbs0", ibdev="rxe0", dev="231:192")
    tree.link("/sys/class/infiniband_verbs/uverbs0", "/sys/devices/virtual/infiniband_verbs/uverbs0")
    root = built(tree, tmp_path)
    found = scan(root)
    (device,) = found.devices
    (rdma,) = device.rdma_devices
    assert (rdma.name, [c.path for c in rdma.char_devices]) == ("rxe0", ["/dev/infiniband/uverbs0"])
    # A pod's, over its own interface of that name.
    without = (replace(device, rdma_devices=()),)
    assert scan(root, lambda name: name != "rxe0").devices == without
    assert (
        rescan(root, replace(found, devices=without), of_function(device.address), lambda _: False).devices == without
    )
    assert rescan(root, replace(found, devices=without), of_function(device.address)).devices == found.devices


def test_a_function_behind_a_volume_management_device_keeps_its_whole_path(tmp_path: Path) -> None:
    tree = NodeTree("vmd", "")
    tree.pci("pci0000:00", "0000:00:0e.0", Ids("010400", "8086", "467f"), 0)
    folder = "/sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e1:00.0"
    tree.files(folder, **{"class": "0x020000"}, vendor="0x15b3", device="0x1021")
    tree.link("/sys/bus/pci/devices/10000:e1:00.0", folder)
    (device,) = scan(built(tree, tmp_path)).devices
    assert device.path == ("pci0000:00", "0000:00:0e.0", "pci10000:e0", "10000:e1:00.0")


def test_sriov_and_rdma_make_any_class_of_device_interesting(tmp_path: Path) -> None:
    tree = NodeTree("classes", "")
    disk = Ids("010802", "144d", "a824", driver="nvme")
    tree.pci("pci0000:00", "0000:00:01.0", disk, 0)
    tree.pci("pci0000:00", "0000:00:02.0", disk, 0)
    tree.vfs("0000:00:02.0", disk, 0, total=4, count=1, offset=1)
    tree.pci("pci0000:00", "0000:00:04.0", Ids("0b4000", "15b3", "0001"), 0)
    tree.rdma("0000:00:04.0", "mlx5_0", "0000:0000:0000:0001", [])
    tree.pci("pci0000:00", "0000:00:05.0", Ids("120000", "1da3", "1020"), 0)
    found = scan(built(tree, tmp_path))
    assert list(found.by_address) == ["0000:00:02.0", "0000:00:02.1", "0000:00:04.0", "0000:00:05.0"]


def test_a_gap_among_the_vfs_does_not_shift_the_indices(tmp_path: Path) -> None:
    root = laid_out("h100-8gpu", tmp_path)
    folder = root / "sys/bus/pci/devices/0000:18:00.0"
    (folder / "virtfn0").unlink()
    (root / "sys/bus/pci/devices/0000:18:00.1").unlink()
    snapshot = scan(root)
    assert snapshot.by_address["0000:18:00.0"].vfs[0] == "0000:18:00.2"
    assert snapshot.by_address["0000:18:00.2"].vf_index == 1


def test_an_unreadable_attribute_is_a_problem_and_the_device_stays(tmp_path: Path) -> None:
    root = laid_out("one-nic", tmp_path)
    attribute = root / "sys/class/net/enp1s0/mtu"
    attribute.unlink()
    attribute.symlink_to("/proc/self/mem")  # reading its first page fails with EIO
    snapshot = scan(root)
    assert problems(snapshot) == {"/sys/class/net/enp1s0/mtu": "cannot be read: Input/output error"}
    assert snapshot.devices[0].netdevs[0].mtu == 0


def test_who_has_no_descriptor_left_does_not_take_the_node_for_empty(tmp_path: Path) -> None:
    root = laid_out("one-nic", tmp_path)
    with descriptors.none_left(), pytest.raises(HardwareError, match=r"/sys/.* cannot be read: Too many open files"):
        scan(root)
    assert len(scan(root).devices) == 1


def test_a_device_without_its_identity_is_left_out_and_named(tmp_path: Path) -> None:
    root = laid_out("one-nic", tmp_path)
    (root / "sys/bus/pci/devices/0000:01:00.0/vendor").write_text("nonsense\n")
    snapshot = scan(root)
    assert snapshot.devices == ()
    assert problems(snapshot) == {"/sys/bus/pci/devices/0000:01:00.0/vendor": "is not a number: 'nonsense'"}
    (root / "sys/bus/pci/devices/0000:01:00.0/vendor").unlink()
    assert "is missing" in scan(root).problems[0].text


def test_a_device_that_vanishes_meanwhile_is_absent_without_a_problem(tmp_path: Path) -> None:
    root = laid_out("h100-8gpu", tmp_path)
    shutil.rmtree((root / "sys/bus/pci/devices/0000:18:00.1").resolve())
    snapshot = scan(root)
    assert "0000:18:00.1" not in snapshot.by_address
    assert snapshot.problems == ()
    assert len(snapshot.devices) == 81


@settings(max_examples=150, deadline=None)
@given(data=st.data(), content=st.binary(max_size=64))
def test_no_content_of_any_attribute_makes_a_scan_fail(node_root: Root, data: st.DataObject, content: bytes) -> None:
    root = node_root(data.draw(st.sampled_from(["ib-dual-port", "efa", "one-nic"])))
    files = sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    victim = data.draw(st.sampled_from(files))
    before = victim.read_bytes()
    try:
        victim.write_bytes(content)
        scan(root)
    finally:
        victim.write_bytes(before)
