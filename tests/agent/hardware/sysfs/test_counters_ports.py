from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agent.hardware import recorded
from agent.hardware.sysfs import scan as sysfs
from agent.hardware.sysfs.counters import read_port_counts, sums, with_busy_vfs
from agent.model.counters import PortCount, VfCounters

RDMA = "sys/class/infiniband/mlx5_0/ports/1/counters"
NETDEV = "sys/class/net/ens1f0np0/statistics"


def write(root: Path, folder: str, **values: str) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (root / folder / name).write_text(value)


def node(tmp_path: Path, name: str) -> Path:
    recorded.unpack(recorded.load(Path(f"tests/nodes/{name}.json")), tmp_path)
    return tmp_path


def test_a_roce_port_counts_rdma_in_words_and_the_network_stack_in_bytes(tmp_path: Path) -> None:
    root = node(tmp_path, "h100-8gpu")
    write(root, RDMA, port_rcv_data="1000\n", port_xmit_data="2000\n")
    write(root, NETDEV, rx_bytes="7\n", tx_bytes="9\n")
    speed = 400e9 / 8
    assert read_port_counts(root, sysfs.scan(root)) == (
        PortCount("0000:18:00.0", "mlx5_0", 1, "rdma", 4000, 8000, speed),
        PortCount("0000:18:00.0", "mlx5_0", 1, "netdev", 7, 9, speed),
    )


def test_the_two_ports_of_an_infiniband_adapter_are_told_apart_and_one_that_is_down_has_no_speed(
    tmp_path: Path,
) -> None:
    root = node(tmp_path, "ib-dual-port")
    (rdma,) = {r.name for d in sysfs.scan(root).devices if not d.is_vf for r in d.rdma_devices if len(r.ports) == 2}
    for port, state in ((1, "4: ACTIVE"), (2, "1: DOWN")):
        folder = f"sys/class/infiniband/{rdma}/ports/{port}"
        write(root, f"{folder}/counters", port_rcv_data=f"{port}\n", port_xmit_data="0\n")
        write(root, folder, state=state, rate="200 Gb/sec (4X HDR)\n")
    found = read_port_counts(root, sysfs.scan(root))
    assert [(count.name, count.port, count.received, count.speed) for count in found] == [
        (f"{rdma}/1", 1, 4, 25e9),
        (f"{rdma}/2", 2, 8, None),
    ]


def test_what_vfs_moved_passes_the_port_of_their_pf(tmp_path: Path) -> None:
    root = node(tmp_path, "h100-8gpu")
    write(root, RDMA, port_rcv_data="0\n", port_xmit_data="0\n")
    snapshot = sysfs.scan(root)
    busy = with_busy_vfs(snapshot, frozenset({"0000:18:00.1"}))
    assert {device.physfn or device.address for device in busy.devices} == {"0000:18:00.0"}
    assert not any(device.rdma_devices or (device.is_vf and device.netdevs) for device in busy.devices)
    told = (
        VfCounters("0000:18:00.1", "ens1f0np0", 0, 0, {"rx_bytes": 100, "tx_bytes": 10}),
        VfCounters("0000:18:00.2", "ens1f0np0", 1, 0, {"rx_bytes": 20, "tx_bytes": 2}),
        VfCounters("0000:18:00.3", "ens1f0np0", 2, 0, {"rx_packets": 9}),
    )
    assert sums(told, snapshot) == {"0000:18:00.0": (120, 12)}
    found = read_port_counts(root, snapshot, sums(told, snapshot))
    assert [(c.traffic, c.received, c.transmitted, c.speed) for c in found] == [
        ("rdma", 0, 0, 50e9),
        ("vf", 120, 12, 50e9),
    ]


def test_the_uplink_of_an_adapter_in_switchdev_mode_counts_all_by_itself(tmp_path: Path) -> None:
    root = node(tmp_path, "h100-8gpu")
    write(root, RDMA, port_rcv_data="1\n", port_xmit_data="1\n")
    write(root, NETDEV, rx_bytes="7\n", tx_bytes="9\n")
    snapshot = sysfs.scan(root)
    pf = snapshot.by_address["0000:18:00.0"]
    representor = replace(pf.netdevs[0], name="eth7", phys_port_name="pf0vf0")
    changed = replace(pf, netdevs=(*pf.netdevs, representor))
    switched = replace(snapshot, devices=tuple(changed if d is pf else d for d in snapshot.devices))
    found = read_port_counts(root, switched, {pf.address: (5, 5)})
    assert [(count.traffic, count.received) for count in found] == [("netdev", 7)]
