"""How long the scheduler is kept busy by pods whose GPU-NIC pairs do not fit a node any more.

On h100-8gpu with 128 VFs, by the stand-in for the scheduler: with a device for each place, as late binding publishes
them, and with a device for each VF. Of the pairs that are asked for one fewer are free. Pods ask for each GPU before
its NIC, which is the order for pairs that must be near; up to four pairs they also ask the other way round, which is
the order for pairs that should be, and the times are added. Times, and the limit, are those of the processor.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from agent.model.device import Snapshot
from hack.sim.cluster.allocator import LIMIT_SECONDS, TooLong
from hack.sim.cluster.claims_for_pairs import UUID, claim, pairs
from measure.dra.published import Published, publish, with_all_aliases
from measure.figures import Figures
from tests.deviceplugin.dra.nodes import with_vfs

SIZES = (1, 4, 8)
VFS = 16
"""Of each port."""
MOST_PREFERRED = 4
"""Pairs that should be near: of more the documents advise against."""
MOST = 0.1
"""So much of the time that a device for each VF takes may places take."""


def measure(snapshot: Snapshot, limit: float = LIMIT_SECONDS) -> Figures:
    """Measure on a node of eight GPUs, each with its port. `limit` is in seconds, of each answer."""
    node = with_vfs(snapshot, VFS)
    vfs = [device.address for device in node.devices if device.is_vf]
    places = publish(node, vfs, "late")
    each = with_all_aliases(publish(node, vfs, "early"))
    found: Figures = {}
    for size in SIZES:
        word = "pair" if size == 1 else "pairs"
        found[f"unsatisfiable_{size}_{word}_ms"] = _answered(places, size, limit)
        found[f"unsatisfiable_{size}_{word}_device_per_vf_ms"] = _answered(each, size, limit)
    return found


def missed(figures: Mapping[str, float]) -> list[str]:
    """Tell which of the times are not short enough."""
    found = []
    for size in SIZES:
        name = f"unsatisfiable_{size}_{'pair' if size == 1 else 'pairs'}"
        here, there = figures[f"{name}_ms"], figures[f"{name}_device_per_vf_ms"]
        if here >= MOST * there:
            found.append(f"{name}_ms is {here:.3g}, must be less than {MOST:g} x {there:.3g}")
    return found


def _answered(published: Published, size: int, limit: float) -> float:
    """Return the milliseconds until a pod of so many pairs is told that it does not fit."""
    gpus = len(published.snapshot.gpus)
    spent = 0.0
    for wanted in (pairs(size, UUID), *([nics_first(size)] if size <= MOST_PREFERRED else [])):
        node = published.node(limit)
        for number in range(gpus - size + 1):
            assert node.allocate({f"taken-{number}": pairs(1, UUID)}), "single pairs fit"
        began = time.thread_time()
        with contextlib.suppress(TooLong):
            assert node.allocate({"late": wanted}) is None, "one GPU is missing"
        spent += time.thread_time() - began
    return spent * 1000


def nics_first(size: int) -> Mapping[str, Any]:
    """Ask for pairs, the NIC of each before its GPU."""
    asked = pairs(size, UUID)["spec"]["devices"]
    swapped = [request for n in range(size) for request in reversed(asked["requests"][2 * n : 2 * n + 2])]
    return claim(swapped, asked["constraints"])
