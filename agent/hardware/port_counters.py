"""Byte counters of adapter ports, from sysfs.

RDMA traffic goes past the kernel: it is counted by the port of the RDMA device (`port_xmit_data`, in units of four
bytes), the traffic of the network stack by the interface. An InfiniBand port counts both: IPoIB is RDMA there.

A PF counts what is its own (mlx5: infiniband/hw/mlx5/mad.c asks for its vport alone). What its VFs moved, RDMA too, it
tells VF by VF. In switchdev mode its interface is the uplink, and counts all that passes the port.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from agent.hardware.sysfs_read import Attributes
from agent.model.bandwidth import PortCount
from agent.model.counters import VfCounters
from agent.model.device import LinkLayer, PciDevice, Snapshot

WORD = 4
BITS = 8
NO_VFS: Mapping[str, tuple[int, int]] = MappingProxyType({})


def read_port_counts(
    root: Path, snapshot: Snapshot, of_vfs: Mapping[str, tuple[int, int]] = NO_VFS
) -> tuple[PortCount, ...]:
    """Read the counters of all adapters in the host. `of_vfs`: PF → bytes that its VFs received, and sent."""
    read = Attributes(root)
    return tuple(
        count
        for device in snapshot.devices
        if not device.is_vf and (device.rdma_devices or device.netdevs)
        for count in _counts(read, device, of_vfs.get(device.address))
    )


def with_busy_vfs(snapshot: Snapshot, held: Set[str]) -> Snapshot:
    """Narrow a snapshot to the PFs of which a VF is held, with all their VFs, and to what PFs tell of VFs.

    `held` are PCI addresses. What a VF counts itself is left out: it comes and goes with pods.
    """
    pfs = {device.physfn for device in snapshot.devices if device.address in held and device.physfn is not None}
    devices = (
        replace(device, rdma_devices=(), netdevs=() if device.is_vf else device.netdevs)
        for device in snapshot.devices
        if (device.physfn or device.address) in pfs
    )
    return Snapshot(devices=tuple(devices))


def sums(vfs: tuple[VfCounters, ...], snapshot: Snapshot) -> dict[str, tuple[int, int]]:
    """Add up what VFs received and sent, in bytes, by the address of their PF."""
    found: dict[str, tuple[int, int]] = {}
    for vf in vfs:
        device, counted = snapshot.by_address.get(vf.device), vf.traffic
        if device is None or device.physfn is None or counted.rx_bytes is None or counted.tx_bytes is None:
            continue
        received, sent = found.get(device.physfn, (0, 0))
        found[device.physfn] = received + counted.rx_bytes, sent + counted.tx_bytes
    return found


def _counts(read: Attributes, device: PciDevice, of_vfs: tuple[int, int] | None) -> Iterator[PortCount]:
    own = [*_rdma(read, device), *_netdev(read, device)]
    has_uplink = any(netdev.is_representor for netdev in device.netdevs)
    yield from (count for count in own if not has_uplink or count.traffic == "netdev")
    if of_vfs is not None and own and not has_uplink:
        yield replace(own[0], traffic="vf", received=of_vfs[0], transmitted=of_vfs[1])


def _rdma(read: Attributes, device: PciDevice) -> Iterator[PortCount]:
    for rdma in device.rdma_devices:
        for port in rdma.ports if not rdma.absent else ():
            folder = f"/sys/class/infiniband/{rdma.name}/ports/{port.number}/counters"
            received, sent = read.whole(f"{folder}/port_rcv_data", -1), read.whole(f"{folder}/port_xmit_data", -1)
            if received >= 0 and sent >= 0:
                # A port that is down tells some rate, too.
                speed = port.rate_gbps * 1e9 / BITS if port.state.startswith("ACTIVE") else 0.0
                name = rdma.name if len(rdma.ports) == 1 else f"{rdma.name}/{port.number}"
                yield PortCount(device.address, name, port.number, "rdma", received * WORD, sent * WORD, speed or None)


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
