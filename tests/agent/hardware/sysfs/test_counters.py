"""Counters of ports and VFs, from files and from a PF's link message."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import NetlinkFailed
from agent.hardware import recorded
from agent.hardware.sysfs import counters
from agent.hardware.sysfs.scan import scan
from agent.model.counters import VF_KINDS, PortCount, VfCounters
from agent.model.device import Snapshot
from tests.agent.hardware.attributes import attribute

NODE = "h100-8gpu"
VF_MAC, VF_STATS, NUM_VF, VFINFO_LIST, VF_INFO = 1, 8, 21, 22, 1


@pytest.fixture
def root(tmp_path: Path) -> Path:
    recorded.unpack(recorded.load(recorded.find(NODE)), tmp_path)
    return tmp_path


def write(root: Path, path: str, value: object) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{value}\n")


def silent(_: str) -> None:
    """Answer as a PF whose driver tells nothing."""


def entry(index: int, counts: dict[int, int] | None) -> bytes:
    """Make a VF's entry as rtnl_fill_vfinfo does."""
    content = attribute(VF_MAC, struct.pack("=I", index) + bytes(32))
    if counts is not None:
        content += attribute(VF_STATS, b"".join(attribute(k, struct.pack("=Q", v)) for k, v in counts.items()))
    return attribute(VF_INFO, content)


def message(entries: list[bytes]) -> bytes:
    return attribute(NUM_VF, struct.pack("=I", len(entries))) + attribute(VFINFO_LIST, b"".join(entries))


def first_pf(snapshot: Snapshot) -> tuple[str, str, list[str]]:
    """Name a PF, its interface and its VFs."""
    pf = next(
        d for d in snapshot.devices if d.is_pf and d.netdev and any(v.physfn == d.address for v in snapshot.devices)
    )
    assert pf.netdev is not None
    vfs = sorted((d for d in snapshot.devices if d.physfn == pf.address), key=lambda d: d.vf_index or 0)
    return pf.address, pf.netdev.name, [d.address for d in vfs]


def test_a_port_has_standard_and_hardware_counters(root: Path) -> None:
    snapshot = scan(root)
    pf, _, _ = first_pf(snapshot)
    rdma = snapshot.by_address[pf].rdma_devices[0]
    port = f"sys/class/infiniband/{rdma.name}/ports/1"
    for name, value in {"port_xmit_data": 250, "symbol_error": 3, "multicast_rcv_packets": "N/A (no PMA)"}.items():
        write(root, f"{port}/counters/{name}", value)
    write(root, f"{port}/hw_counters/out_of_sequence", 7)
    write(root, f"{port}/hw_counters/lifespan", 12)
    found = next(p for p in counters.read(root, snapshot, frozenset(), silent).rdma if p.device == pf)
    assert (found.rdma_device, found.port, found.active) == (rdma.name, 1, True)
    assert found.standard["port_xmit_data"] == 250
    assert found.standard["symbol_error"] == 3
    assert "multicast_rcv_packets" not in found.standard
    assert found.hardware == {"out_of_sequence": 7}


def test_an_rdma_device_of_a_vf_is_read_while_a_pod_has_it(root: Path) -> None:
    snapshot = scan(root)
    _, _, (vf, *_) = first_pf(snapshot)
    rdma = snapshot.by_address[vf].rdma_devices[0]
    for name in ("port_rcv_data", "symbol_error"):
        write(root, f"sys/class/infiniband/{rdma.name}/ports/1/counters/{name}", 5)
    assert all(port.device != vf for port in counters.read(root, snapshot, frozenset(), silent).rdma)
    (found,) = (port for port in counters.read(root, snapshot, {vf}, silent).rdma if port.device == vf)
    assert found.standard == {"port_rcv_data": 5}


def test_a_pf_tells_by_netlink_what_its_vfs_did(root: Path) -> None:
    snapshot = scan(root)
    _, netdev, vfs = first_pf(snapshot)
    all_kinds = {0: 1, 1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 99, 7: 7, 8: 8}
    body = message([entry(0, all_kinds), entry(1, {2: 2**63}), entry(2, None)])
    asked = []

    def ask(name: str) -> bytes | None:
        asked.append(name)
        return body if name == netdev else None

    found = {vf.device: vf for vf in counters.read(root, snapshot, frozenset(), ask).vfs}
    assert found[vfs[0]].traffic == dict(zip(VF_KINDS, range(1, 9), strict=True))
    assert (found[vfs[0]].pf, found[vfs[0]].vf_index) == (netdev, 0)
    assert found[vfs[1]].traffic == {"rx_bytes": 2**63}
    assert asked.count(netdev) == 1


@pytest.mark.parametrize("number", [1, 16, 128, 256, 600])
def test_all_vfs_are_read_however_many_there_are(number: int) -> None:
    """More than some 200 VFs make the list's length of 16 bits wrap round."""
    found = counters.traffic_of_all(
        message([entry(i, dict.fromkeys((0, 1, 2, 3, 4, 5, 7, 8), i)) for i in range(number)])
    )
    assert found == {i: dict.fromkeys(VF_KINDS, i) for i in range(number)}


def test_files_of_the_driver_come_before_netlink(root: Path) -> None:
    snapshot = scan(root)
    _, netdev, vfs = first_pf(snapshot)
    folder = (root / f"sys/class/net/{netdev}/device").resolve().relative_to(root)
    write(root, f"{folder}/sriov/1/stats/rx_bytes", 77)
    found = counters.read(root, snapshot, frozenset(), lambda name: message([entry(0, {0: 1}), entry(1, {0: 1})]))
    assert [(v.device, v.traffic) for v in found.vfs if v.pf == netdev] == [(vfs[1], {"rx_bytes": 77})]


def test_a_driver_whose_files_are_no_counters_is_asked_by_netlink(root: Path) -> None:
    snapshot = scan(root)
    _, netdev, vfs = first_pf(snapshot)
    folder = (root / f"sys/class/net/{netdev}/device").resolve().relative_to(root)
    for number in (0, 1):
        write(root, f"{folder}/sriov/{number}/stats", "tx_packets    : 5011\ntx_bytes      : 4450870")
    found = counters.read(root, snapshot, frozenset(), lambda name: message([entry(0, {2: 7}), entry(1, {2: 9})]))
    told = {v.device: v.traffic for v in found.vfs if v.pf == netdev}
    assert told == {vfs[0]: {"rx_bytes": 7}, vfs[1]: {"rx_bytes": 9}}


def test_an_interface_in_the_host_tells_of_its_vf_where_the_pf_does_not(root: Path) -> None:
    snapshot = scan(root)
    _, _, (vf, *_) = first_pf(snapshot)
    own = snapshot.by_address[vf].netdev
    assert own is not None
    folder = (root / f"sys/class/net/{own.name}").resolve().relative_to(root)
    for name, value in {"rx_bytes": 1, "tx_dropped": 2, "multicast": 3}.items():
        write(root, f"{folder}/statistics/{name}", value)

    def refuse(_: str) -> bytes | None:
        raise NetlinkFailed("read", 90, "Message too long")

    def noughts(_: str) -> bytes | None:
        """Answer as the kernel does for a driver that does not count."""
        return message([entry(index, dict.fromkeys((0, 1, 2, 3, 4, 5, 7, 8), 0)) for index in range(4)])

    for ask in (refuse, noughts):
        found = {v.device: v.traffic for v in counters.read(root, snapshot, frozenset(), ask).vfs}
        assert found[vf] == {"rx_bytes": 1, "tx_dropped": 2, "rx_multicast": 3}


RDMA = "sys/class/infiniband/mlx5_0/ports/1/counters"
NETDEV = "sys/class/net/ens1f0np0/statistics"


def write_all(root: Path, folder: str, **values: str) -> None:
    for name, value in values.items():
        write(root, f"{folder}/{name}", value)


def test_a_roce_port_counts_rdma_in_words_and_the_network_stack_in_bytes(root: Path) -> None:
    write_all(root, RDMA, port_rcv_data="1000", port_xmit_data="2000")
    write_all(root, NETDEV, rx_bytes="7", tx_bytes="9")
    speed = 400e9 / 8
    assert counters.read_port_counts(root, scan(root)) == (
        PortCount("0000:18:00.0", "mlx5_0", 1, "rdma", 4000, 8000, speed),
        PortCount("0000:18:00.0", "mlx5_0", 1, "netdev", 7, 9, speed),
    )


def test_the_two_ports_of_an_infiniband_adapter_are_told_apart_and_one_that_is_down_has_no_speed(
    tmp_path: Path,
) -> None:
    recorded.unpack(recorded.load(recorded.find("ib-dual-port")), root := tmp_path)
    (rdma,) = {r.name for d in scan(root).devices if not d.is_vf for r in d.rdma_devices if len(r.ports) == 2}
    for port, state in ((1, "4: ACTIVE"), (2, "1: DOWN")):
        folder = f"sys/class/infiniband/{rdma}/ports/{port}"
        write_all(root, f"{folder}/counters", port_rcv_data=f"{port}", port_xmit_data="0")
        write_all(root, folder, state=state, rate="200 Gb/sec (4X HDR)")
    found = counters.read_port_counts(root, scan(root))
    assert [(count.name, count.port, count.received, count.speed) for count in found] == [
        (f"{rdma}/1", 1, 4, 25e9),
        (f"{rdma}/2", 2, 8, None),
    ]


def test_what_vfs_moved_passes_the_port_of_their_pf(root: Path) -> None:
    write_all(root, RDMA, port_rcv_data="0", port_xmit_data="0")
    snapshot = scan(root)
    busy = counters.with_busy_vfs(snapshot, frozenset({"0000:18:00.1"}))
    assert {device.physfn or device.address for device in busy.devices} == {"0000:18:00.0"}
    assert not any(device.rdma_devices or (device.is_vf and device.netdevs) for device in busy.devices)
    told = (
        VfCounters("0000:18:00.1", "ens1f0np0", 0, 0, {"rx_bytes": 100, "tx_bytes": 10}),
        VfCounters("0000:18:00.2", "ens1f0np0", 1, 0, {"rx_bytes": 20, "tx_bytes": 2}),
        VfCounters("0000:18:00.3", "ens1f0np0", 2, 0, {"rx_packets": 9}),
    )
    assert counters.sums(told, snapshot) == {"0000:18:00.0": (120, 12)}
    found = counters.read_port_counts(root, snapshot, counters.sums(told, snapshot))
    assert [(c.traffic, c.received, c.transmitted, c.speed) for c in found] == [
        ("rdma", 0, 0, 50e9),
        ("vf", 120, 12, 50e9),
    ]


def test_the_uplink_of_an_adapter_in_switchdev_mode_counts_all_by_itself(root: Path) -> None:
    write_all(root, RDMA, port_rcv_data="1", port_xmit_data="1")
    write_all(root, NETDEV, rx_bytes="7", tx_bytes="9")
    snapshot = scan(root)
    pf = snapshot.by_address["0000:18:00.0"]
    representor = replace(pf.netdevs[0], name="eth7", phys_port_name="pf0vf0")
    changed = replace(pf, netdevs=(*pf.netdevs, representor))
    switched = replace(snapshot, devices=tuple(changed if d is pf else d for d in snapshot.devices))
    found = counters.read_port_counts(root, switched, {pf.address: (5, 5)})
    assert [(count.traffic, count.received) for count in found] == [("netdev", 7)]
