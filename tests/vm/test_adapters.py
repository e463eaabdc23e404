"""The machine itself: what all the other tests here stand on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vm.adapters import PCI_DEVICES, Pf, netdevs

MakeVfs = Callable[[Pf, int], tuple[str, ...]]


def test_the_two_adapters_stand_behind_root_ports_of_their_own_on_two_numa_nodes(pfs: tuple[Pf, ...]) -> None:
    first, second = pfs
    assert (first.netdev, second.netdev) == ("eth0", "eth1")
    assert [(pf.folder / "numa_node").read_text().strip() for pf in pfs] == ["0", "1"]
    ports = [pf.folder.resolve().parent for pf in pfs]
    assert ports[0].parent != ports[1].parent
    assert all((port / "class").read_text().strip() == "0x060400" for port in ports)


def test_vfs_appear_with_their_index_and_their_pfs_numa_node(pfs: tuple[Pf, ...], vfs: MakeVfs) -> None:
    for pf in pfs:
        made = vfs(pf, 3)
        assert len(made) == 3
        for address in made:
            folder = PCI_DEVICES / address
            assert (folder / "physfn").resolve() == pf.folder.resolve()
            assert (folder / "driver").resolve().name == "igbvf"
            assert (folder / "numa_node").read_text() == (pf.folder / "numa_node").read_text()
            assert len(netdevs(address)) == 1


def test_the_number_of_vfs_cannot_be_changed_without_going_through_0(pfs: tuple[Pf, ...], vfs: MakeVfs) -> None:
    vfs(pfs[0], 1)
    with pytest.raises(OSError, match="busy"):
        (pfs[0].folder / "sriov_numvfs").write_text("2")


def test_soft_roce_has_an_rdma_device_with_its_char_devices(pfs: tuple[Pf, ...], rxe: Callable[[str], str]) -> None:
    device = Path("/sys/class/infiniband", rxe(pfs[0].netdev))
    assert (device / "parent").read_text().strip() == pfs[0].netdev
    assert Path("/dev/infiniband/uverbs0").is_char_device()
    assert Path("/dev/infiniband/rdma_cm").is_char_device()
