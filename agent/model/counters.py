"""What adapters have counted, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
class VfTraffic:
    """What a PF counted of one VF: IFLA_VF_STATS_* (include/uapi/linux/if_link.h). None: the driver does not tell."""

    rx_packets: int | None = None
    tx_packets: int | None = None
    rx_bytes: int | None = None
    tx_bytes: int | None = None
    rx_broadcast: int | None = None
    rx_multicast: int | None = None
    rx_dropped: int | None = None
    tx_dropped: int | None = None


@dataclass(frozen=True, slots=True)
class VfCounters:
    """What was counted of one VF, whoever has it."""

    device: str
    """PCI address of the VF."""
    pf: str
    """The PF's interface."""
    vf_index: int
    numa_node: int
    traffic: VfTraffic


@dataclass(frozen=True, slots=True)
class Counters:
    """All that the node's adapters count at one moment."""

    rdma: tuple[RdmaPortCounters, ...] = ()
    vfs: tuple[VfCounters, ...] = ()
