"""Tables of GIDs in a modelled node's sysfs, entered as the kernel does."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_interface
from pathlib import Path


def enter(device: Path, index: int, address: str, ifname: str, *, kind: str = "RoCE v2", port: int = 1) -> None:
    """Enter an interface's address (CIDR) into the table of an RDMA device, by its folder in sysfs."""
    folder = device / f"ports/{port}"
    ip = ip_interface(address).ip
    gid = (ip if isinstance(ip, IPv6Address) else IPv6Address(f"::ffff:{ip}")).exploded
    for name, text in (("gids", gid), ("gid_attrs/types", kind), ("gid_attrs/ndevs", ifname)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / str(index)).write_text(f"{text}\n")
    (folder / "link_layer").write_text("Ethernet\n")
