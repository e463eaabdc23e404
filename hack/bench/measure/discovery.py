"""How long the scan of a large node takes, with its sysfs on disk as a kernel shows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from agent.hardware import recorded
from agent.hardware.sysfs import scan as sysfs
from measure.figures import Figures, quantile

NODE = "dense-16x64"
VFS = 1024


def measure(folder: Path, runs: int, say: Callable[[str], None]) -> Figures:
    """Scan the modelled node several times."""
    say(f"discovery: {runs} scans of {NODE}")
    recorded.unpack(recorded.load(recorded.find(NODE)), folder)
    sample = []
    for _ in range(runs):
        began = time.perf_counter()
        snapshot = sysfs.scan(folder)
        sample.append((time.perf_counter() - began) * 1000)
        found = sum(device.is_vf for device in snapshot.devices)
        if found != VFS or snapshot.problems:
            raise RuntimeError(f"the scan found {found} VFs instead of {VFS}; problems: {snapshot.problems[:3]}")
    return {"discovery_1024_vf_ms": quantile(sample, 0.5), "discovery_1024_vf_p99_ms": quantile(sample, 0.99)}
