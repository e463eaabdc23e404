"""Socket and core of each CPU, as /sys/devices/system/cpu shows them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from agent.hardware.sysfs_read import Attributes
from agent.model.cpu import CpuPlace

_CPUS = "/sys/devices/system/cpu"


def read_cpu_places(root: Path, cpus: Iterable[int]) -> dict[int, CpuPlace]:
    """Read where these CPUs are. One whose place the kernel does not tell is left out, as one that is offline is.

    Two small files a CPU: the caller reads them once for as long as the CPUs stay the same.
    """
    read = Attributes(root)
    found = {}
    for cpu in cpus:
        folder = f"{_CPUS}/cpu{cpu}/topology"
        socket, core = read.whole(f"{folder}/physical_package_id", -1), read.whole(f"{folder}/core_id", -1)
        if socket >= 0 and core >= 0:
            found[cpu] = CpuPlace(socket, core)
    return found
