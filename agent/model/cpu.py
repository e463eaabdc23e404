"""Where a CPU is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CpuPlace:
    socket: int
    core: int
    """Unique within its socket only."""


def cpu_list(cpus: Iterable[int]) -> str:
    """Write a set of CPUs as the kernel and kubelet do: {0, 1, 2, 8} → `0-2,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
