"""What a process costs while nothing happens."""

from __future__ import annotations

import time
from pathlib import Path


def resident_mib(pid: int) -> float:
    """Return the resident set in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no resident set: it has ended")


def cpu_percent(pid: int, seconds: float) -> float:
    """Watch a process for some seconds, and return its share of one processor in percent."""
    began, before = time.monotonic(), _cpu_seconds(pid)
    time.sleep(seconds)
    return (_cpu_seconds(pid) - before) / (time.monotonic() - began) * 100


def _cpu_seconds(pid: int) -> float:
    # schedstat counts nanoseconds; stat's ticks of 10 ms are too coarse for an idle process.
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
