"""Collects what Data Direct needs of a node. Reads only: the library is searched as a file, and never loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from agent.model.device import Snapshot
from agent.report.doctor.data_direct_facts import DataDirectFacts, Port, functions, shared_ports

_LIBRARY = "libmlx5.so.1"
_FOLDERS = ("usr/lib64", "usr/lib", "usr/lib/aarch64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/local/lib")
_SYMBOL = b"mlx5dv_get_data_direct_sysfs_path"
"""By which programs find the function, from rdma-core 54 on (debian/ibverbs-providers.symbols, MLX5_1.25)."""
_MOST_LIBRARY_BYTES = 16 << 20
_SWITCH = ("0x15b3", "0x197c")
"""Vendor and device of ports of a ConnectX's own switch."""
_CONFIG_BYTES, _FIRST_CAPABILITY, _ACS = 4096, 0x100, 0x000D


def collect(root: Path, snapshot: Snapshot) -> DataDirectFacts | None:
    """Look at kernel, library and switch; None where no adapter has a Data Direct function. Never raises."""
    if not functions(snapshot):
        return None
    library, knows = _library(root)
    ports = [port for port in shared_ports(snapshot) if _is_of_switch(root, port)]
    release = (_bytes(root / "proc/sys/kernel/osrelease", 256) or b"").decode(errors="replace").strip()
    return DataDirectFacts(release, library, knows, tuple((port, _acs_control(root, port)) for port in ports))


def acs_control(config: bytes) -> int | None:
    """Read the ACS control register in a function's configuration space; None if it has none, or it was cut off."""
    offset, seen = _FIRST_CAPABILITY, set[int]()
    while offset >= _FIRST_CAPABILITY and offset + 8 <= len(config) and offset not in seen:
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(config[offset + 6 : offset + 8], "little")
        offset = header >> 20 & 0xFFC
    return None


def _library(root: Path) -> tuple[str, bool]:
    """Find the host's libmlx5, and whether it knows Data Direct."""
    for folder in _FOLDERS:
        found = _bytes(root / folder / _LIBRARY, _MOST_LIBRARY_BYTES)
        if found is not None:
            return f"/{folder}/{_LIBRARY}", _SYMBOL in found
    return "", False


def _is_of_switch(root: Path, port: Port) -> bool:
    return tuple(_texts(root, port.address, "vendor", "device")) == _SWITCH


def _acs_control(root: Path, port: Port) -> int | None:
    return acs_control(_bytes(_function(root, port.address) / "config", _CONFIG_BYTES) or b"")


def _texts(root: Path, address: str, *names: str) -> Iterator[str]:
    for name in names:
        yield (_bytes(_function(root, address) / name, 64) or b"").decode(errors="replace").strip()


def _function(root: Path, address: str) -> Path:
    return root / "sys/bus/pci/devices" / address


def _bytes(path: Path, most: int) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(most)
    except OSError:
        return None
