"""RDMA devices, their ports and their character devices as /sys/class/infiniband* shows them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_interface
from pathlib import Path

from agent.hardware.sysfs.read import Attributes, shown
from agent.model.change import NOTHING, Change, of_function
from agent.model.device import CharDevice, LinkLayer, RdmaDevice, RdmaPort, Snapshot

_GID = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4}){7}")
_LINK_LAYER = {"InfiniBand": LinkLayer.INFINIBAND, "Ethernet": LinkLayer.ETHERNET}
"""Anything else is `Unknown` to sysfs (drivers/infiniband/core/sysfs.c, link_layer_show)."""

KINDS = ("uverbs", "umad", "issm")
CharDevices = Mapping[str, tuple[CharDevice, ...]]


def read_char_device(read: Attributes, folder: str, name: str) -> tuple[str, CharDevice] | None:
    """Read one character device and the name of its RDMA device; None if it is none, or gone."""
    kind = name.rstrip("0123456789")
    if kind == name or kind not in KINDS:
        return None
    ibdev = read.text(f"{folder}/{name}/ibdev")
    if not ibdev:
        return None
    port = read.whole(f"{folder}/{name}/port", 0) if kind != "uverbs" else 0
    return ibdev, CharDevice(kind, f"/dev/infiniband/{name}", port or None)


def in_order(devices: Iterable[CharDevice]) -> tuple[CharDevice, ...]:
    """Sort the character devices of one RDMA device by kind and number."""
    return tuple(sorted(devices, key=lambda d: (KINDS.index(d.kind), len(d.path), d.path)))


def read_rdma_device(read: Attributes, name: str, char_devices: CharDevices) -> RdmaDevice | None:
    """Read one RDMA device; None if it went away meanwhile."""
    folder = f"/sys/class/infiniband/{name}"
    node_type = read.text(f"{folder}/node_type")
    if node_type is None:
        read.lacks(folder, "node_type")
        return None
    ports = [_port(read, f"{folder}/ports/{n}", int(n)) for n in read.names(f"{folder}/ports") if n.isdecimal()]
    return RdmaDevice(
        name=shown(name),
        node_type=_word(node_type),
        node_guid=read.text(f"{folder}/node_guid") or "",
        fw_version=read.text(f"{folder}/fw_ver") or "",
        ports=tuple(sorted(ports, key=lambda p: p.number)),
        char_devices=char_devices.get(shown(name), ()),
    )


def absent_rdma_device(name: str, char_devices: CharDevices) -> RdmaDevice:
    """Say what can be known of an RDMA device that is in a pod: that it is there, and its character devices."""
    return RdmaDevice(name, "", "", "", (), char_devices.get(name, ()), absent=True)


def rdma_cm_present(read: Attributes) -> bool:
    """Tell whether the RDMA connection manager has its device."""
    return read.exists("/dev/infiniband/rdma_cm") or read.exists("/sys/class/misc/rdma_cm")


def _port(read: Attributes, folder: str, number: int) -> RdmaPort:
    link_layer = _LINK_LAYER.get(read.text(f"{folder}/link_layer") or "", LinkLayer.UNSPECIFIED)
    state = _word(read.text(f"{folder}/state")) or "UNKNOWN"
    is_infiniband = link_layer is LinkLayer.INFINIBAND
    return RdmaPort(
        number=number,
        state=state,
        link_layer=link_layer,
        rate_gbps=_rate(read, f"{folder}/rate"),
        pkey=(is_infiniband and read.whole(f"{folder}/pkeys/0", 0, 16)) or None,
        subnet_prefix=_prefix(read.text(f"{folder}/gids/0")) if is_infiniband and state == "ACTIVE" else "",
    )


def _prefix(gid: str | None) -> str:
    """Take the first half of sysfs' `fe80:0000:0000:0000:f452:1403:007b:cba1`."""
    return gid[:19].replace(":", "") if gid is not None and _GID.fullmatch(gid) else ""


def _word(text: str | None) -> str:
    """Keep the word of sysfs' `4: ACTIVE`."""
    return (text or "").partition(":")[2].strip() or (text or "")


def _rate(read: Attributes, path: str) -> float:
    """Read `400 Gb/sec (4X NDR)` as 400.0; 0 if the port does not tell."""
    text = read.text(path)
    if not text:
        return 0.0
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        read.note(path, f"is not a rate: {text[:40]!r}")
        return 0.0


def silent_changes(root: Path, snapshot: Snapshot) -> Change:
    """Name the functions with a port that is in another state than the snapshot shows, and that nothing tells of.

    No kernel event tells of an InfiniBand port, where no IPoIB interface does. A RoCE port is as its interface is; in a
    bond it is as the bond (drivers/infiniband/hw/mlx5/main.c, mlx5_query_port_roce), which takes its time to follow
    the links below it, and is no hardware whose events are heard. Only the states are read.
    """
    read, changed = Attributes(root), NOTHING
    for device in snapshot.devices:
        in_bond = any(netdev.is_enslaved for netdev in device.netdevs)
        if not device.is_vf and any(_is_stale(read, rdma, in_bond) for rdma in device.rdma_devices):
            changed |= of_function(device.address)
    return changed


def _is_stale(read: Attributes, rdma: RdmaDevice, in_bond: bool) -> bool:
    """Tell whether a port of a device, of InfiniBand or in a bond, is in another state by now."""
    for port in rdma.ports:
        if in_bond or port.link_layer is LinkLayer.INFINIBAND:
            state = _word(read.text(f"/sys/class/infiniband/{rdma.name}/ports/{port.number}/state"))
            if state and state != port.state:
                return True
    return False


ROCE_V2 = "RoCE v2"
ETHERNET = "Ethernet"


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's table."""

    port: int
    index: int
    address: str
    """Which of an interface's addresses it stands for, without the length of its prefix."""


def roce_ports(device: Path) -> tuple[Path, ...]:
    """List the Ethernet ports of an RDMA device, by its folder in /sys/class/infiniband; none if it is not seen."""
    ports = sorted((device / "ports" / name for name in _listed(device / "ports")), key=lambda port: port.name)
    return tuple(port for port in ports if _text(port / "link_layer") == ETHERNET)


def find_gids(ports: Sequence[Path], addresses: Sequence[str], ifname: str) -> tuple[Gid, ...]:
    """List the entries of the best that an interface has of some addresses (CIDR): IPv4 before IPv6, in their order.

    More than one if it cannot be told which is the interface's: another pod's may have its name and its address.
    """
    wanted = {_spelt(address): rank for rank, address in enumerate(best_first(addresses))}
    found: list[tuple[tuple[int, bool], Gid]] = []
    for port in ports:
        for name in _listed(port / "gids"):
            gid = _text(port / "gids" / name)
            if gid in wanted and _text(port / "gid_attrs/types" / name) == ROCE_V2:
                is_another = _text(port / "gid_attrs/ndevs" / name) != ifname
                found.append(((wanted[gid], is_another), Gid(int(port.name), int(name), _short(gid))))
    best = min((rank for rank, _ in found), default=None)
    return tuple(sorted((gid for rank, gid in found if rank == best), key=lambda gid: (gid.port, gid.index)))


def best_first(addresses: Sequence[str]) -> tuple[str, ...]:
    """Sort addresses as libraries prefer them: IPv4 before IPv6."""
    return tuple(sorted(addresses, key=lambda address: ip_interface(address).version))


def _spelt(address: str) -> str:
    """Spell an address as sysfs does: 0000:0000:0000:0000:0000:ffff:0a00:0001."""
    ip = ip_interface(address).ip
    return (ip if isinstance(ip, IPv6Address) else IPv6Address(f"::ffff:{ip}")).exploded


def _short(gid: str) -> str:
    ip = IPv6Address(gid)
    return str(ip.ipv4_mapped or ip)


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:  # EINVAL: an entry of the table that is empty
        return ""
