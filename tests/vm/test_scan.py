"""The scan of a real kernel's /sys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agent.hardware.sysfs.scan import scan
from agent.model.device import LinkLayer
from agent.model.locality import Locality, locality
from tests.vm.adapters import MakeVfs, Pf, netdevs


def test_the_scan_finds_pfs_vfs_indices_nodes_and_the_hca_of_a_netdev(
    pfs: tuple[Pf, ...], vfs: MakeVfs, rxe: Callable[[str], str]
) -> None:
    made = {pf.address: vfs(pf, 3) for pf in pfs}
    hca = rxe(pfs[1].netdev)

    snapshot = scan(Path("/"))

    assert not snapshot.problems
    for pf, numa_node in zip(pfs, (0, 1), strict=True):
        device = snapshot.by_address[pf.address]
        assert device.is_pf
        assert (device.driver, device.numa_node, device.sriov_totalvfs) == ("igb", numa_node, 7)
        assert device.vfs[:3] == made[pf.address]
        assert device.netdev is not None
        assert device.netdev.name == pf.netdev
        for index, address in enumerate(made[pf.address]):
            vf = snapshot.by_address[address]
            assert (vf.physfn, vf.vf_index, vf.numa_node, vf.driver) == (pf.address, index, numa_node, "igbvf")
            assert tuple(n.name for n in vf.netdevs) == netdevs(address)
            assert not vf.rdma_devices
    first, second = (snapshot.by_address[pf.address] for pf in pfs)
    assert locality(first, second) is Locality.SYS
    assert locality(first, snapshot.by_address[made[first.address][2]]) <= Locality.PIX

    assert not first.rdma_devices
    (roce,) = second.rdma_devices
    assert roce.name == hca
    assert roce.ports[0].link_layer is LinkLayer.ETHERNET
    assert roce.ports[0].state == "ACTIVE"
    assert [c.path for c in roce.char_device("uverbs")] == ["/dev/infiniband/uverbs0"]
    assert snapshot.rdma_cm
    assert [node.number for node in snapshot.numa_nodes] == [0, 1]
    assert snapshot.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
