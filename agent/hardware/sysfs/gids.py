"""The GIDs of an RDMA device: at which index of a port's table an interface's address stands for RoCE v2.

The kernel enters the addresses of each interface upon a port's own, in whatever namespace it is, some time after they
were set (drivers/infiniband/core/roce_gid_mgmt.c). Files: Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_interface
from pathlib import Path

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
