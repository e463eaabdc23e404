"""The NVIDIA driver's device files, for containers that get them one by one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

MIG_MINORS = "proc/driver/nvidia-caps/mig-minors"


def device_nodes(root: Path) -> frozenset[str]:
    """List the driver's nodes: /dev/nvidia0, /dev/nvidiactl … None on a node without the driver."""
    try:
        names = os.listdir(root / "dev")
    except OSError:
        return frozenset()
    return frozenset(f"/dev/{name}" for name in names if name.startswith("nvidia") and name != "nvidia-caps")


def mig_minors(root: Path) -> Mapping[str, int]:
    """Read which minor number of nvidia-caps opens what: `gpu0/gi7/access` → 66. Empty where no GPU can be cut.

    The driver writes a line for every slice that there could be; those are the same on all hosts.
    """
    try:
        lines = (root / MIG_MINORS).read_text("ascii", "replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
