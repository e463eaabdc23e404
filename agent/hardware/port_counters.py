"""Byte counters of adapter ports, from sysfs.

RDMA traffic goes past the kernel: it is counted by the port of the RDMA device (`port_xmit_data`, in units of four
bytes), the traffic of the network stack by the interface. An InfiniBand port counts both: IPoIB is RDMA there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agent.hardware.sysfs_read import Attributes
from agent.model.bandwidth import PortCount
from agent.model.device import LinkLayer, PciDevice, Snapshot

WORD = 4
BITS = 8


def read_port_counts(root: Path, snapshot: Snapshot) -> tuple[PortCount, ...]:
    """Read the counters of all adapters in the host, VFs left out: their traffic passes their PF's port."""
    read = Attributes(root)
    return tuple(
        count
        for device in snapshot.devices
        if not device.is_vf and (device.rdma_devices or device.netdevs)
        for count in (*_rdma(read, device), *_netdev(read, device))
    )


def _rdma(read: Attributes, device: PciDevice) -> Iterator[PortCount]:
    for rdma in device.rdma_devices:
        for port in rdma.ports if not rdma.absent else ():
            folder = f"/sys/class/infiniband/{rdma.name}/ports/{port.number}/counters"
            received, sent = read.whole(f"{folder}/port_rcv_data", -1), read.whole(f"{folder}/port_xmit_data", -1)
            if received >= 0 and sent >= 0:
                speed = port.rate_gbps * 1e9 / BITS or None
                name = rdma.name if len(rdma.ports) == 1 else f"{rdma.name}/{port.number}"
                yield PortCount(device.address, name, port.number, "rdma", received * WORD, sent * WORD, speed)


def _netdev(read: Attributes, device: PciDevice) -> Iterator[PortCount]:
    """Read the interfaces of the device itself. Without an RDMA device their numbers are those of the ports."""
    own = [n for n in device.netdevs if not n.is_representor and n.link_layer is not LinkLayer.INFINIBAND]
    for netdev in own:
        folder = f"/sys/class/net/{netdev.name}/statistics"
        received, sent = read.whole(f"{folder}/rx_bytes", -1), read.whole(f"{folder}/tx_bytes", -1)
        if received < 0 or sent < 0:
            continue
        rdma = next((r for r in device.rdma_devices if not r.absent), None)
        number = netdev.dev_port + 1
        name = netdev.name if rdma is None else rdma.name if len(rdma.ports) == 1 else f"{rdma.name}/{number}"
        speed = netdev.speed_mbps * 1e6 / BITS if netdev.speed_mbps else None
        yield PortCount(device.address, name, number, "netdev", received, sent, speed)
