"""GPUs and accelerators of any vendor by sysfs alone: which functions are some, and what plugins call them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from agent.hardware import recorded
from agent.hardware.sysfs.scan import rescan, scan
from agent.model.change import of_function
from agent.model.device import Gpu, Snapshot, is_accelerator
from agent.placement import Distances
from hack.node_tree import Ids, NodeTree
from tests.node import pci

Root = Callable[[str], Path]
Snapshots = Callable[[str], Snapshot]
PORT = Ids("060400", "8086", "352a", driver="pcieport")


KINDS = yaml.safe_load(Path(__file__).with_name("accelerators.yaml").read_text())


@pytest.mark.parametrize(("pci_class", "vendor", "driver", "is_one"), KINDS)
def test_what_computes_is_an_accelerator_and_a_picture_is_none(
    pci_class: int, vendor: int, driver: str | None, is_one: bool
) -> None:
    found = pci("0000:3b:00.0", ("pci0000:3a", "0000:3a:01.0"), pci_class=pci_class, vendor=vendor, driver=driver)
    assert is_accelerator(found) is is_one
    assert not is_accelerator(replace(found, physfn="0000:3b:00.0"))


def test_a_processors_own_picture_is_no_accelerator() -> None:
    assert not is_accelerator(pci("0000:00:02.0", ("pci0000:00",), pci_class=0x038000, vendor=0x8086, driver="i915"))


def test_amds_gpus_are_known_with_their_names_and_links(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("mi250-8gpu")
    gpus = snapshot.all_gpus
    assert [(gpu.index, gpu.names) for gpu in gpus] == [(n, (f"card{n}", f"renderD{128 + n}")) for n in range(8)]
    assert gpus[0].uuid == gpus[0].pci_address == "0000:28:00.0"
    assert (gpus[0].name, gpus[0].memory_bytes) == ("AMD Instinct MI250 (MCM) OAM AC MBA", 65520 << 20)
    distances = Distances(snapshot)
    assert [distances.links(distances.gpus[0], peer) for peer in distances.gpus] == [0, 4, 1, 0, 0, 0, 2, 0]


def test_where_nvml_answers_a_gpu_is_listed_once_and_the_others_after_those(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    assert snapshot.all_gpus == snapshot.gpus
    silent = replace(snapshot, gpus=snapshot.gpus[1:])
    assert [gpu.uuid for gpu in silent.all_gpus] == [*(g.uuid for g in snapshot.gpus[1:]), snapshot.gpus[0].pci_address]
    assert silent.all_gpus[-1].index == 8
    without = replace(snapshot, gpus=())
    assert Distances(without).gpus == tuple(sorted(gpu.pci_address for gpu in snapshot.gpus))
    assert Distances(without).gpu("0") is None, "the driver's numbers are not known"


def node(*functions: tuple[str, Ids]) -> NodeTree:
    made = NodeTree("test", "")
    made.numa(["0-7", "8-15"], 1 << 10)
    for address, ids in functions:
        bus = f"{int(address[5:7], 16) - 1:02x}"
        port = made.pci(f"pci0000:{bus}", f"0000:{bus}:00.0", PORT, 0)
        made.pci(port, address, ids, 0)
    return made


def scanned(made: NodeTree, folder: Path) -> tuple[Gpu, ...]:
    recorded.unpack(recorded.parse(made.document(), "test"), folder)
    return scan(folder).accelerators


def test_a_partition_of_amds_is_its_gpu(tmp_path: Path, node_root: Root) -> None:
    root = tmp_path / "root"
    shutil.copytree(node_root("mi300x-8gpu"), root, symlinks=True)
    nodes = root / "sys/devices/virtual/kfd/kfd/topology/nodes"
    for number, gpu, minor in ((40, 3, 136), (41, 6, 137)):
        (root / f"sys/devices/platform/amdgpu_xcp_{number}/drm/renderD{minor}").mkdir(parents=True)
        (nodes / str(number)).mkdir()
        own = (nodes / str(2 + gpu) / "properties").read_text().replace(f"minor {128 + gpu}", f"minor {minor}")
        place = int(own.partition("location_id ")[2].split()[0])
        # The partition's number is in the upper bits, and says nothing of where it is.
        own = own.replace(f"location_id {place}", f"location_id {place | 1 << 28}")
        (nodes / str(number) / "properties").write_text(own)
    (root / "sys/devices/platform/amdgpu_xcp_42/drm/renderD190").mkdir(parents=True)  # not in use
    snapshot = scan(root)
    distances = Distances(snapshot)
    assert distances.gpu("amdgpu_xcp_40") == distances.gpus[3]
    assert distances.gpu("amdgpu_xcp_41") == distances.gpus[6]
    assert distances.gpu("amdgpu_xcp_42") is None
    assert distances.links(distances.gpus[3], distances.gpus[6]) == 1
    assert len(distances.gpus) == 8


def test_huaweis_devices_have_the_drivers_number(tmp_path: Path) -> None:
    huawei = Ids("120000", "19e5", "d802", driver="devdrv_device_driver")
    made = node(("0000:82:00.0", huawei), ("0000:c1:00.0", huawei))
    for address, folder in (("0000:82:00.0", "81"), ("0000:c1:00.0", "c0")):
        path = f"/sys/devices/pci0000:{folder}/0000:{folder}:00.0/{address}"
        made.file(f"{path}/devdrv_sysfs_bdf_to_devid", "c1:00.0 ---> 0\n82:00.0 ---> 3")
    found = scanned(made, tmp_path)
    assert [(gpu.pci_address, gpu.names, gpu.name) for gpu in found] == [
        ("0000:82:00.0", ("davinci3",), "Huawei d802"),
        ("0000:c1:00.0", ("davinci0",), "Huawei d802"),
    ]


def test_others_have_the_names_of_their_device_files(tmp_path: Path) -> None:
    made = node(
        ("0000:33:00.0", Ids("120000", "1da3", "1020", driver="habanalabs")),
        ("0000:44:00.0", Ids("038000", "8086", "0bd5", driver="i915")),
        ("0000:55:00.0", Ids("120000", "cabc", "0370", driver="cambricon")),
    )
    gaudi, intel, other = (
        f"/sys/devices/pci0000:{above}/0000:{above}:00.0/{address}"
        for above, address in (("32", "0000:33:00.0"), ("43", "0000:44:00.0"), ("54", "0000:55:00.0"))
    )
    for path in (f"{gaudi}/accel/accel4", f"{gaudi}/infiniband_verbs/uverbs3", f"{intel}/drm/card1"):
        made.file(f"{path}/dev", "1:1")
    made.file(f"{other}/cambricon/cambricon_dev2/dev", "240:2")
    made.file(f"{other}/hwmon/hwmon3/name", "no device file")
    assert [gpu.names for gpu in scanned(made, tmp_path)] == [("accel4",), ("card1",), ("cambricon_dev2",)]


def test_an_accelerator_whose_driver_comes_is_read_anew_and_others_are_not(tmp_path: Path) -> None:
    made = node(("0000:33:00.0", Ids("120000", "1002", "74a1", driver="amdgpu")))
    scanned(made, tmp_path)
    before = scan(tmp_path)
    (tmp_path / "sys/bus/pci/devices/0000:33:00.0/drm/card0").mkdir(parents=True)
    assert rescan(tmp_path, before, of_function("0000:44:00.0")).accelerators is before.accelerators
    after = rescan(tmp_path, before, of_function("0000:33:00.0"))
    assert [gpu.names for gpu in after.accelerators] == [("card0",)]
    assert after == scan(tmp_path)
