"""Device-info files: what they say, when they are written, and whose are removed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from agent.edits.device_info import GrantedFiles, describe, remove_attached, write_attached
from agent.model.device import LinkLayer, Netdev, RdmaDevice, VdpaDevice
from tests.cni.tiny_node import PF, tiny_snapshot, vf

VF = vf(1)
ATTACHED = "k8s.cni.cncf.io/devinfo/cni"
DOCUMENT = {"type": "pci", "version": "1.1.0", "pci": {"pci-address": VF}}
NAME = f"intel.com-vf_rdma-{VF}-device.json"
RESOURCE = "intel.com/vf_rdma"


def keep(files: GrantedFiles, *granted: tuple[str, str]) -> None:
    needless, missing = files.changes(granted, [RESOURCE])
    files.keep(needless, dict.fromkeys(missing, DOCUMENT))


@pytest.fixture
def files(tmp_path: Path) -> GrantedFiles:
    return GrantedFiles(tmp_path / "devinfo")


def test_rdma_devices_and_the_representor_are_told() -> None:
    snapshot = tiny_snapshot(3)
    rdma = tuple(RdmaDevice(name, "CA", "", "", (), ()) for name in ("mlx5_4", "mlx5_5"))
    ends = tuple(
        Netdev(f"ens1f0_{port}", 50 + port, "02:00:00:00:00:09", 1500, "up", True, LinkLayer.ETHERNET, None, name)
        for port, name in enumerate(("pf0vf0", "c1pf0vf1", "pf0vf11"))
    )
    devices = tuple(
        replace(device, rdma_devices=rdma)
        if device.address == VF
        else replace(device, netdevs=device.netdevs + ends)
        if device.address == PF
        else device
        for device in snapshot.devices
    )
    assert describe(replace(snapshot, devices=devices), VF)["pci"] == {
        "pci-address": VF,
        "rdma-device": "mlx5_4,mlx5_5",
        "pf-pci-address": PF,
        "representor-device": "ens1f0_1",
    }


@pytest.mark.parametrize(
    ("vdpa", "more"),
    [
        (VdpaDevice("vdpa0", "vhost_vdpa", "/dev/vhost-vdpa-0"), {"driver": "vhost", "path": "/dev/vhost-vdpa-0"}),
        (VdpaDevice("vdpa0", "virtio_vdpa", ""), {"driver": "virtio"}),
    ],
)
def test_a_vdpa_device_is_described_as_one(vdpa: VdpaDevice, more: dict[str, str], tmp_path: Path) -> None:
    snapshot = tiny_snapshot(3)
    devices = tuple(replace(d, vdpa=vdpa) if d.address == VF else d for d in snapshot.devices)
    document = describe(replace(snapshot, devices=devices), VF)
    told = {"pci-address": VF, "parent-device": "vdpa0", "pf-pci-address": PF, **more}
    assert document == {"type": "vdpa", "version": "1.1.0", "vdpa": told}
    file = tmp_path / ATTACHED / "attached.json"
    file.parent.mkdir(parents=True)
    write_attached(str(file), document)
    remove_attached(str(file), VF)
    assert not file.exists()


def test_a_vdpa_device_without_a_driver_is_none() -> None:
    snapshot = tiny_snapshot(3)
    devices = tuple(replace(d, vdpa=VdpaDevice("vdpa0", "", "")) if d.address == VF else d for d in snapshot.devices)
    assert describe(replace(snapshot, devices=devices), VF)["type"] == "pci"


def test_a_device_out_of_sight_is_described_by_what_is_remembered() -> None:
    assert describe(tiny_snapshot(3), "0000:ff:00.1", ["mlx5_9", ""])["pci"] == {
        "pci-address": "0000:ff:00.1",
        "rdma-device": "mlx5_9",
    }


def test_a_granted_unit_gets_the_file_that_multus_looks_for(files: GrantedFiles) -> None:
    files.write(RESOURCE, VF, DOCUMENT)
    file = files.folder / NAME
    assert json.loads(file.read_text()) == DOCUMENT
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o755
    files.write(RESOURCE, VF, {**DOCUMENT, "x": 1})
    assert json.loads(file.read_text())["x"] == 1
    assert os.listdir(files.folder) == [NAME]


def test_what_a_killed_process_of_the_same_number_left_is_replaced(files: GrantedFiles) -> None:
    files.folder.mkdir(parents=True)
    (files.folder / f".{NAME}.{os.getpid()}").write_text("half a docu")
    files.write(RESOURCE, VF, DOCUMENT)
    assert json.loads((files.folder / NAME).read_text()) == DOCUMENT
    assert os.listdir(files.folder) == [NAME]


def test_a_name_that_cannot_be_freed_keeps_no_other_from_its_file(files: GrantedFiles) -> None:
    (files.folder / f"intel.com-vf_rdma-{vf(0)}-device.json" / "x").mkdir(parents=True)
    keep(files, (RESOURCE, VF))
    assert json.loads((files.folder / NAME).read_text()) == DOCUMENT


def test_a_disk_that_is_full_is_left_without_half_a_file(tmp_path: Path, own_network: None) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "nodefabric-test", tmp_path], check=True)
    files = GrantedFiles(tmp_path)
    files.folder.mkdir()
    files.write(RESOURCE, VF, {**DOCUMENT, "long": "x" * 9000})
    assert os.listdir(files.folder) == []
    files.write(RESOURCE, VF, DOCUMENT)
    assert os.listdir(files.folder) == [NAME]
    subprocess.run(["umount", tmp_path], check=True)


def test_files_of_what_is_free_go_and_missing_ones_come_back(files: GrantedFiles) -> None:
    files.write(RESOURCE, VF, {**DOCUMENT, "first": True})
    files.write(RESOURCE, vf(0), DOCUMENT)
    granted = [(RESOURCE, VF), (RESOURCE, vf(2))]
    assert any(files.changes(granted, [RESOURCE]))
    keep(files, *granted)
    assert not any(files.changes(granted, [RESOURCE]))
    assert sorted(os.listdir(files.folder)) == [NAME, f"intel.com-vf_rdma-{vf(2)}-device.json"]
    assert "first" in json.loads((files.folder / NAME).read_text())
    keep(files)
    assert os.listdir(files.folder) == []


def test_files_of_others_stay(files: GrantedFiles) -> None:
    others = (f"intel.com-vf_rdma-2-{VF}-device.json", f"rdma-vf-{VF}-device.json", "x", f"intel.com-vf_rdma-{VF}.json")
    files.folder.mkdir(parents=True)
    for name in others:
        (files.folder / name).write_text("{}")
    keep(files)
    assert sorted(os.listdir(files.folder)) == sorted(others)


def test_a_folder_that_cannot_be_written_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / ATTACHED).parent.parent.mkdir()
    (tmp_path / ATTACHED).parent.write_text("a file")
    files = GrantedFiles((tmp_path / ATTACHED).parent)
    files.write(RESOURCE, VF, DOCUMENT)
    keep(files, (RESOURCE, VF))
    write_attached(str(tmp_path / ATTACHED / "x"), DOCUMENT)
    assert (tmp_path / ATTACHED).parent.read_text() == "a file"


def test_an_attachments_file_is_written_unless_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / ATTACHED / "net-c1_net1"
    path.parent.parent.mkdir(parents=True)
    write_attached(str(path), DOCUMENT)
    assert json.loads(path.read_text()) == DOCUMENT
    write_attached(str(path), {**DOCUMENT, "x": 1})
    assert json.loads(path.read_text()) == DOCUMENT
    remove_attached(str(path), VF)
    remove_attached(str(path), VF)
    assert not path.exists()


def test_an_attachments_file_whose_name_no_disk_takes_keeps_no_pod_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Multus calls it by network, container and interface: the name of a network alone may have 253 characters."""
    (tmp_path / ATTACHED).mkdir(parents=True)
    write_attached(str(tmp_path / ATTACHED / ("n" * 253 + "-c1_net1")), DOCUMENT)
    assert "is not written: File name too long" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", '{"pci": 5}', '{"pci": {}}', '{"pci": {"pci-address": "0000:00:00.0"}}', "[" * 5000]
)
def test_a_file_that_tells_of_another_device_or_of_none_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / ATTACHED / "x"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    remove_attached(str(path), VF)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "place",
    [
        *("networks/rails/10.0.0.5", "spool/1.del", "devinfo/cni/x", f"{ATTACHED}/x/y", f"{ATTACHED}.d/x"),
        *(f"{ATTACHED}/x", f"as/many/folders/as/a/tenant/likes/{ATTACHED}/x"),
    ],
)
def test_an_attachments_file_is_made_and_removed_nowhere_but_in_the_folder_for_it(tmp_path: Path, place: str) -> None:
    """Who may write networks of a namespace says where it is, and the agent is root."""
    path = tmp_path / place
    write_attached(str(path), DOCUMENT)
    assert list(tmp_path.iterdir()) == []
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(DOCUMENT))
    remove_attached(str(path), VF)
    assert path.exists() != place.endswith(f"{ATTACHED}/x")
