"""InfiniBand partitions as a port's table in sysfs shows them. The subnet manager writes it, nobody else."""

from __future__ import annotations

import os
from pathlib import Path

from agent.errors import HardwareError

_MEMBERSHIP = 0x8000


def require(device: Path, port: int, pkey: int) -> None:
    """Raise HardwareError if a port is not a member of a partition. `device` is a PCI function's folder."""
    if not has(device, port, pkey):
        known = ", ".join(f"{entry:#06x}" for entry in table(device, port))
        raise HardwareError(
            f"port {port} of {device.resolve().name} is not in partition {pkey:#06x}, but in {known}: add its GUID to"
            " that partition in the subnet manager"
        )


def has(device: Path, port: int, pkey: int) -> bool:
    """Tell whether a port is a member of a partition. One whose table cannot be read is taken for one."""
    entries = table(device, port)
    return not entries or any(is_same(entry, pkey) for entry in entries)


def is_same(one: int, other: int) -> bool:
    """Tell whether two keys are of one partition, whoever is a full member of it."""
    return (one ^ other) & ~_MEMBERSHIP == 0


def table(device: Path, port: int) -> tuple[int, ...]:
    """List the partitions of a port, in the order of the table; entries without one are left out."""
    try:
        rdma = sorted(os.listdir(device / "infiniband"))
        folder = device / "infiniband" / rdma[0] / "ports" / str(port) / "pkeys"
        indices = sorted((name for name in os.listdir(folder) if name.isdecimal()), key=int)
    except (OSError, IndexError):
        return ()
    found = (number(text(folder / index)) for index in indices)
    return tuple(entry for entry in found if entry)


def first(device: Path, port: int) -> int | None:
    """Return the partition at index 0, which programs take that ask for none; None if it cannot be read."""
    try:
        rdma = sorted(os.listdir(device / "infiniband"))
    except OSError:
        return None
    return number(text(device / "infiniband" / rdma[0] / "ports" / str(port) / "pkeys/0")) if rdma else None


def port_of(netdev: Path) -> int:
    """Return the port of an interface; `netdev` is its folder in /sys/class/net."""
    value = number(text(netdev / "dev_port"))
    return 1 if value is None else value + 1


def number(value: str) -> int | None:
    """Read what sysfs writes as 0x8001 or 1."""
    try:
        return int(value, 0)
    except ValueError:
        return None


def text(path: Path) -> str:
    """Read a file of sysfs; an empty text if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
