"""Binding PCI functions to drivers and freeing them, through sysfs. The kernel has done it when the write returns."""

from __future__ import annotations

import os
from pathlib import Path

from agent.errors import HardwareError


def unbind(root: Path, device: str) -> None:
    """Free a function from its driver. One without is success."""
    path = root / "sys/bus/pci/devices" / device / "driver/unbind"
    try:
        path.write_text(device)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if path.exists():
            raise HardwareError(f"{device} cannot be unbound from its driver: {error.strerror}") from error


def bind(root: Path, device: str, driver: str) -> None:
    """Bind a function to a driver. One that is bound to it already is success."""
    try:
        (root / "sys/bus/pci/drivers" / driver / "bind").write_text(device)
    except OSError as error:
        bound = root / "sys/bus/pci/devices" / device / "driver"
        if not bound.exists() or bound.resolve().name != driver:
            raise HardwareError(
                f"{device} cannot be bound to {driver}: {error.strerror}; look at the kernel's log (dmesg)"
            ) from error


def require_writable(root: Path, what: str) -> None:
    """Raise HardwareError where sysfs is read-only, as in most containers, before anything begins."""
    path = root / "sys/bus/pci"
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise HardwareError(f"{path} is read-only, and {what} writes there: add daemonset/components/sysfs")
