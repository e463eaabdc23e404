"""What adapters of a real kernel count."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from agent.hardware.netlink.vf_control import PfNetlink
from agent.hardware.sysfs import counters
from agent.hardware.sysfs.scan import scan
from agent.model.counters import Counters
from tests.vm.adapters import MakeVfs, Pf, ip, netdevs, wait_until


def test_soft_roce_and_vfs_tell_what_passed(pfs: tuple[Pf, ...], vfs: MakeVfs, rxe: Callable[[str], str]) -> None:
    made = vfs(pfs[0], 2)
    hca = rxe(pfs[1].netdev)
    (sender,) = netdevs(made[0])
    ip("link", "set", sender, "up")
    wait_until("the link", lambda: Path(f"/sys/class/net/{sender}/carrier").read_text().strip() == "1")
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
        raw.bind((sender, 0))
        for _ in range(5):
            raw.send(bytes.fromhex("ffffffffffff 020000000001 88b5".replace(" ", "")) + bytes(50))

    def told() -> Counters | None:
        found = counters.read(Path("/"), scan(Path("/")), frozenset(), PfNetlink().traffic)
        traffic = {vf.device: vf.traffic for vf in found.vfs}
        return found if traffic[made[0]]["tx_packets"] >= 5 else None

    found = wait_until("the counters, which the driver brings up to date now and then", told)
    (port,) = (p for p in found.rdma if p.rdma_device == hca)
    assert port.active
    assert {"sent_pkts", "rcvd_pkts"} <= set(port.hardware)
    traffic = {vf.device: vf.traffic for vf in found.vfs}
    assert set(made) <= set(traffic)
    assert traffic[made[0]]["tx_bytes"] >= 5 * 60
