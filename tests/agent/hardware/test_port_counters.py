from __future__ import annotations

from pathlib import Path

from agent.hardware import sysfs
from agent.hardware.port_counters import read_port_counts
from agent.model.bandwidth import PortCount
from agent.sim import recorded

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


def test_a_node_without_counters_has_no_ports_to_tell_of(tmp_path: Path) -> None:
    root = node(tmp_path, "h100-8gpu")
    assert read_port_counts(root, sysfs.scan(root)) == ()


def test_the_two_ports_of_an_infiniband_adapter_are_told_apart(tmp_path: Path) -> None:
    root = node(tmp_path, "ib-dual-port")
    snapshot = sysfs.scan(root)
    (rdma,) = {r.name for d in snapshot.devices if not d.is_vf for r in d.rdma_devices if len(r.ports) == 2}
    for port in (1, 2):
        folder = f"sys/class/infiniband/{rdma}/ports/{port}/counters"
        write(root, folder, port_rcv_data=f"{port}\n", port_xmit_data="0\n")
    found = read_port_counts(root, snapshot)
    assert [(count.name, count.port, count.received) for count in found] == [(f"{rdma}/1", 1, 4), (f"{rdma}/2", 2, 8)]
