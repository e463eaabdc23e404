"""Counters of RDMA ports and of VFs, read when somebody scrapes.

A VF's traffic is told by its PF: in files of its own where the driver makes them (ice, i40e out of the tree), else by
rtnetlink, which lists all VFs of a PF in one answer. Where neither tells (all noughts), the VF's own interface does,
while it is in the host. Layout: Documentation/ABI/stable/sysfs-class-infiniband; include/uapi/linux/if_link.h.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import astuple, fields
from pathlib import Path

from agent.errors import HardwareError
from agent.hardware.link_messages import attribute_table, attributes
from agent.hardware.sysfs_read import Attributes
from agent.hardware.vf_settings import entries
from agent.model.counters import Counters, RdmaPortCounters, VfCounters, VfTraffic
from agent.model.device import PciDevice, RdmaDevice, Snapshot

IFLA_VF_STATS = 8
_KINDS = {
    0: "rx_packets",
    1: "tx_packets",
    2: "rx_bytes",
    3: "tx_bytes",
    4: "rx_broadcast",
    5: "rx_multicast",
    7: "rx_dropped",
    8: "tx_dropped",
}
"""IFLA_VF_STATS_*; 6 is padding."""
_OF_FILES = tuple((field.name, field.name) for field in fields(VfTraffic))
_OF_INTERFACE = (*((name, name) for name in _KINDS.values() if "cast" not in name), ("rx_multicast", "multicast"))
_NO_COUNTERS = frozenset(("lifespan",))
"""How long, in milliseconds, the driver answers from memory."""
_OF_HELD_VFS = ("port_rcv_data", "port_xmit_data", "port_rcv_packets", "port_xmit_packets")
"""All that is read of a VF's RDMA device: a thousand of these, with sixty files each, would take seconds."""
_COUNT = struct.Struct("=Q")

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


def traffic_of_all(body: bytes) -> dict[int, VfTraffic]:
    """Read the traffic of each VF from a PF's link message, by VF index. Empty where the driver does not count."""
    found = {}
    for index, start, end in entries(body):
        nested = attribute_table(body[start:end]).get(IFLA_VF_STATS)
        if nested is None:
            continue
        counts = {
            _KINDS[kind]: _COUNT.unpack(content)[0]
            for kind, content in attributes(nested)
            if kind in _KINDS and len(content) == _COUNT.size
        }
        if counts:
            found[index] = VfTraffic(**counts)
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
    told: Mapping[int, VfTraffic] = {} if own_files else _asked(ask, netdev.name)
    for vf in vfs:
        if vf.vf_index is None:
            continue
        traffic = told.get(vf.vf_index)
        if own_files:
            traffic = _read(files, f"{folder}/{vf.vf_index}/stats", _OF_FILES)
        if traffic is None and vf.netdev is not None:
            traffic = _read(files, f"/sys/class/net/{vf.netdev.name}/statistics", _OF_INTERFACE)
        if traffic is not None:
            yield VfCounters(vf.address, netdev.name, vf.vf_index, vf.numa_node, traffic)


def _asked(ask: AskPf, netdev: str) -> Mapping[int, VfTraffic]:
    try:
        body = ask(netdev)
    except HardwareError:  # gone just now, or an InfiniBand PF with more VFs than an answer holds
        return {}
    found = traffic_of_all(body) if body is not None else {}
    # For a driver that does not count, the kernel answers noughts (net/core/rtnetlink.c, rtnl_fill_vfinfo).
    return found if any(any(astuple(traffic)) for traffic in found.values()) else {}


def _read(files: Attributes, folder: str, names: tuple[tuple[str, str], ...]) -> VfTraffic | None:
    found = files.wholes(folder, (name for _, name in names))
    counts = {field: found[name] for field, name in names if name in found}
    return VfTraffic(**counts) if counts else None
