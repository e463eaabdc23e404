"""What adapters have counted, and from counters of bytes to bandwidth and to a load that seldom changes. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

STEP = 25
"""Loads are told in steps of so many percent of the line rate."""
VF_KINDS = (
    *("rx_packets", "tx_packets", "rx_bytes", "tx_bytes"),
    *("rx_broadcast", "rx_multicast", "rx_dropped", "tx_dropped"),
)
"""What is counted of a VF."""
MARGIN = 5
"""So far must a load be past the middle between two steps to be told as the next one."""


@dataclass(frozen=True, slots=True)
class RdmaPortCounters:
    """Counters of one port of an RDMA device, since its driver was loaded."""

    device: str
    """PCI address."""
    rdma_device: str
    port: int
    active: bool
    standard: Mapping[str, int]
    """/sys/class/infiniband/*/ports/*/counters, by file name; data in words of four bytes."""
    hardware: Mapping[str, int]
    """/sys/class/infiniband/*/ports/*/hw_counters, by file name."""


@dataclass(frozen=True, slots=True)
class VfCounters:
    """What was counted of one VF, whoever has it."""

    device: str
    """PCI address of the VF."""
    pf: str
    """The PF's interface."""
    vf_index: int
    numa_node: int
    traffic: Mapping[str, int]
    """`VF_KINDS` that the driver counts."""


@dataclass(frozen=True, slots=True)
class Counters:
    """All that the node's adapters count at one moment."""

    rdma: tuple[RdmaPortCounters, ...] = ()
    vfs: tuple[VfCounters, ...] = ()


@dataclass(frozen=True, slots=True)
class PortCount:
    """What has passed a port so far."""

    device: str
    """PCI address."""
    name: str
    """RDMA device, else interface."""
    port: int
    traffic: str
    """rdma: what adapters move for verbs; netdev: what the kernel's network stack moves; vf: all that VFs move."""
    received: int
    """Bytes."""
    transmitted: int
    """Bytes."""
    speed: float | None
    """Bytes per second that the line carries each way; None if the link is down or does not say."""

    @property
    def key(self) -> tuple[str, int, str]:
        return self.device, self.port, self.traffic


@dataclass(frozen=True, slots=True)
class PortRate:
    """How much passes a port, in bytes per second."""

    count: PortCount
    received: float
    transmitted: float


def rates(before: Iterable[PortCount], now: Iterable[PortCount], seconds: float) -> tuple[PortRate, ...]:
    """Work out what passed between two readings. A port whose counters were set back meanwhile is left out."""
    old = {count.key: count for count in before}
    found = []
    for count in now:
        was = old.get(count.key)
        if was is None or seconds <= 0 or count.received < was.received or count.transmitted < was.transmitted:
            continue
        received, transmitted = count.received - was.received, count.transmitted - was.transmitted
        found.append(PortRate(count, received / seconds, transmitted / seconds))
    return tuple(found)


def loads(found: Iterable[PortRate]) -> dict[str, float]:
    """Work out the load of each device in percent: the busier direction of its busiest port, RDMA and other traffic."""
    passed: dict[tuple[str, int], tuple[str, list[float], float]] = {}
    for rate in found:
        name, sums, speed = passed.get((rate.count.device, rate.count.port), (rate.count.name, [0.0, 0.0], 0.0))
        sums[0] += rate.received
        sums[1] += rate.transmitted
        passed[rate.count.device, rate.count.port] = name, sums, max(speed, rate.count.speed or 0.0)
    result: dict[str, float] = {}
    for name, sums, speed in passed.values():
        if speed:
            result[name] = max(result.get(name, 0.0), min(100.0, 100 * max(sums) / speed))
    return result


def in_steps(load: Mapping[str, float], told: Mapping[str, int]) -> dict[str, int]:
    """Round loads to steps, keeping what was told while a load is not clearly nearer to another step."""
    return {name: _step(value, told.get(name)) for name, value in load.items()}


def _step(value: float, told: int | None) -> int:
    if told is not None and abs(value - told) <= STEP / 2 + MARGIN:
        return told
    return int((value + STEP / 2) // STEP * STEP)


def annotation(steps: Mapping[str, int]) -> str:
    """Write loads as the annotation holds them: `{"mlx5_0":25}`, percent by device."""
    return json.dumps(dict(sorted(steps.items())), separators=(",", ":"))


def parse_annotation(text: str) -> dict[str, int]:
    """Read what `annotation` wrote; nothing of anything else."""
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(document, dict):
        return {}
    return {str(name): value for name, value in document.items() if type(value) is int}
