"""Counters of RDMA ports and of VFs, read when somebody scrapes, and the bytes that adapters' ports move.

RDMA traffic goes past the kernel: it is counted by the port of the RDMA device (`port_xmit_data`, in units of four
bytes), the traffic of the network stack by the interface. An InfiniBand port counts both: IPoIB is RDMA there.

A PF counts what is its own (mlx5: infiniband/hw/mlx5/mad.c asks for its vport alone). What its VFs moved, RDMA too, it
tells VF by VF. In switchdev mode its interface is the uplink, and counts all that passes the port.

A VF's traffic is told by its PF: in files of its own where the driver makes them (ice, i40e out of the tree), else by
rtnetlink, which lists all VFs of a PF in one answer. Where neither tells (all noughts), the VF's own interface does,
while it is in the host. Layout: Documentation/ABI/stable/sysfs-class-infiniband; include/uapi/linux/if_link.h.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from agent.errors import HardwareError
from agent.hardware.netlink.rtnetlink import attribute_table, attributes
from agent.hardware.netlink.vf_control import vf_entries
from agent.hardware.sysfs.read import Attributes
from agent.model.counters import VF_KINDS, Counters, PortCount, RdmaPortCounters, VfCounters
from agent.model.device import LinkLayer, PciDevice, RdmaDevice, Snapshot

IFLA_VF_STATS = 8
_KINDS = dict(zip((0, 1, 2, 3, 4, 5, 7, 8), VF_KINDS, strict=True))
"""IFLA_VF_STATS_*; 6 is padding (include/uapi/linux/if_link.h)."""
_OF_FILES = tuple((name, name) for name in VF_KINDS)
_OF_INTERFACE = (*((name, name) for name in VF_KINDS if "cast" not in name), ("rx_multicast", "multicast"))
_NO_COUNTERS = frozenset(("lifespan",))
"""How long, in milliseconds, the driver answers from memory."""
_OF_HELD_VFS = ("port_rcv_data", "port_xmit_data", "port_rcv_packets", "port_xmit_packets")
"""All that is read of a VF's RDMA device: a thousand of these, with sixty files each, would take seconds."""
_COUNT = struct.Struct("=Q")
WORD = 4
BITS = 8
NO_VFS: Mapping[str, tuple[int, int]] = MappingProxyType({})

AskPf = Callable[[str], bytes | None]
"""A PF's interface → the attributes of its link message with all VFs. Raises HardwareError."""


def read(root: Path, snapshot: Snapshot, held: Set[str], ask: AskPf) -> Counters:
    """Read all counters; those of a VF's RDMA device if the VF (PCI address) is held by a pod.

    What has no answer is left out.
    """
    files = Attributes(root)
    vfs: dict[str, list[PciDevice]] = {}
    for device in snapshot.devices:
        if device.physfn is not None:
            vfs.setdefault(device.physfn, []).append(device)
    return Counters(
        rdma=tuple(port for device in snapshot.devices for port in _ports(files, device, held)),
        vfs=tuple(
            vf
            for pf, its in vfs.items()
            if (found := snapshot.by_address.get(pf)) is not None
            for vf in _of_pf(files, found, its, ask)
        ),
    )


def traffic_of_all(body: bytes) -> dict[int, dict[str, int]]:
    """Read the traffic of each VF from a PF's link message, by VF index. Empty where the driver does not count."""
    found = {}
    for index, start, end in vf_entries(body):
        nested = attribute_table(body[start:end]).get(IFLA_VF_STATS)
        if nested is None:
            continue
        counts = {
            _KINDS[kind]: _COUNT.unpack(content)[0]
            for kind, content in attributes(nested)
            if kind in _KINDS and len(content) == _COUNT.size
        }
        if counts:
            found[index] = counts
    return found


def _ports(files: Attributes, device: PciDevice, held: Set[str]) -> Iterator[RdmaPortCounters]:
    if device.is_vf and device.address not in held:
        return
    for rdma in device.rdma_devices:
        if not rdma.absent:
            yield from _ports_of(files, device, rdma)


def _ports_of(files: Attributes, device: PciDevice, rdma: RdmaDevice) -> Iterator[RdmaPortCounters]:
    for port in rdma.ports:
        folder = f"/sys/class/infiniband/{rdma.name}/ports/{port.number}"
        wanted = _OF_HELD_VFS if device.is_vf else None
        yield RdmaPortCounters(
            device=device.address,
            rdma_device=rdma.name,
            port=port.number,
            active=port.state.startswith("ACTIVE"),
            standard=_folder(files, f"{folder}/counters", wanted),
            hardware={} if device.is_vf else _folder(files, f"{folder}/hw_counters"),
        )


def _folder(files: Attributes, folder: str, names: tuple[str, ...] | None = None) -> dict[str, int]:
    wanted = files.names(folder) if names is None else names
    return files.wholes(folder, (name for name in wanted if name not in _NO_COUNTERS))


def _of_pf(files: Attributes, pf: PciDevice, vfs: list[PciDevice], ask: AskPf) -> Iterator[VfCounters]:
    netdev = pf.netdev
    if netdev is None:
        return
    folder = f"/sys/class/net/{netdev.name}/device/sriov"
    # NVIDIA's own drivers have one text per VF in its place (MLNX_OFED); they count for rtnetlink as well.
    own_files = files.exists(folder) and any(files.names(f"{folder}/{vf.vf_index}/stats") for vf in vfs)
    told: Mapping[int, dict[str, int]] = {} if own_files else _asked(ask, netdev.name)
    for vf in vfs:
        if vf.vf_index is None:
            continue
        traffic = told.get(vf.vf_index)
        if own_files:
            traffic = _read(files, f"{folder}/{vf.vf_index}/stats", _OF_FILES)
        if not traffic and vf.netdev is not None:
            traffic = _read(files, f"/sys/class/net/{vf.netdev.name}/statistics", _OF_INTERFACE)
        if traffic:
            yield VfCounters(vf.address, netdev.name, vf.vf_index, vf.numa_node, traffic)


def _asked(ask: AskPf, netdev: str) -> Mapping[int, dict[str, int]]:
    try:
        body = ask(netdev)
    except HardwareError:  # gone just now, or an InfiniBand PF with more VFs than an answer holds
        return {}
    found = traffic_of_all(body) if body is not None else {}
    # For a driver that does not count, the kernel answers noughts (net/core/rtnetlink.c, rtnl_fill_vfinfo).
    return found if any(any(traffic.values()) for traffic in found.values()) else {}


def _read(files: Attributes, folder: str, names: tuple[tuple[str, str], ...]) -> dict[str, int]:
    found = files.wholes(folder, (name for _, name in names))
    return {field: found[name] for field, name in names if name in found}


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
        if device is None or device.physfn is None or not counted.keys() >= {"rx_bytes", "tx_bytes"}:
            continue
        received, sent = found.get(device.physfn, (0, 0))
        found[device.physfn] = received + counted["rx_bytes"], sent + counted["tx_bytes"]
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
