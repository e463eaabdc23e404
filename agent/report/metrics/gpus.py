"""Series about GPUs: as the last scan saw them, and what the driver tells of them (XIDs).

An XID is counted, logged, noted among the recent events, and passed on to the book of health.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from agent.health import HealthBook
from agent.model.device import Snapshot
from agent.model.device_health import UNKNOWN_XID, XID_REASONS, XIDS, GpuEvent
from agent.report.events import Events

SAME_SECONDS = 60.0
"""The same error of a GPU is logged and noted once in so long; all are counted."""
MOST_REMEMBERED = 1000

log = logging.getLogger(__name__)


def gpu_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Build the series of GPUs and of their MIG slices."""
    available = GaugeMetricFamily(
        "nodefabric_gpu_monitor_available",
        "0 if the NVIDIA driver's library does not answer: series of GPUs are then as last seen.",
    )
    available.add_metric((), not any(problem.path == "nvml" for problem in snapshot.problems))
    info = GaugeMetricFamily(
        "nodefabric_gpu_info",
        "1 for each GPU of any vendor; without NVML, gpu is its PCI address.",
        labels=("gpu", "device", "name", "index", "mig", "fabric_clique"),
    )
    memory = GaugeMetricFamily(
        "nodefabric_gpu_memory_bytes", "Memory of a GPU or of a MIG slice.", labels=("gpu", "mig_device", "profile")
    )
    peers = GaugeMetricFamily(
        "nodefabric_gpu_nvlink_peers", "GPUs of this node that the GPU reaches by NVLink or xGMI.", labels=("gpu",)
    )
    ailment = GaugeMetricFamily("nodefabric_gpu_ailment", "1 for each condition of a GPU.", labels=("gpu", "reason"))
    unknown = GaugeMetricFamily(
        "nodefabric_adapter_nearness_unknown",
        "1 for each adapter whose nearness to GPUs is not known: its Data Direct function is not known.",
        labels=("device",),
    )
    for device in sorted(snapshot.data_direct.unknown if snapshot.all_gpus else ()):
        unknown.add_metric((device,), 1)
    for gpu in snapshot.all_gpus:
        mig = "enabled" if gpu.mig_mode else "disabled"
        info.add_metric((gpu.uuid, gpu.pci_address, gpu.name, str(gpu.index), mig, gpu.fabric_clique), 1)
        memory.add_metric((gpu.uuid, "", ""), gpu.memory_bytes)
        for slice_ in gpu.mig_devices:
            memory.add_metric((gpu.uuid, slice_.uuid, slice_.profile), slice_.memory_bytes)
        peers.add_metric((gpu.uuid,), len(gpu.nvlinks))
        for reason in gpu.ailments:
            ailment.add_metric((gpu.uuid, reason), 1)
    yield from (available, info, memory, peers, ailment, unknown)


class GpuErrors:
    """Takes events in on any thread, and neither blocks nor raises."""

    def __init__(self, book: HealthBook, registry: CollectorRegistry, events: Events) -> None:
        """`book` is told of each event, and says by what policy it counts."""
        self._book = book
        self._events = events
        self._logged: dict[tuple[str, int], float] = {}
        """When an error of a GPU was last logged."""
        self._counter = Counter(
            "nodefabric_gpu_errors",
            "Errors that the NVIDIA driver reported (XIDs), by number and class.",
            ("xid", "class"),
            registry=registry,
        )

    def take(self, event: GpuEvent) -> None:
        """Take an event in."""
        self._book.gpu_event(event)
        kind = self._book.settings.gpu_policy.classify(event.xid)
        self._counter.labels(str(event.xid) if event.xid in XIDS else "other", kind.value).inc()
        subject = event.mig_uuid or event.gpu_uuid or "a GPU that the driver does not name"
        text = f"XID {event.xid} ({kind.value}): {XIDS.get(event.xid, UNKNOWN_XID)[1]}"
        is_serious = kind in XID_REASONS
        if self._is_news(subject, event):
            self._events.note("health", subject, text, warning=is_serious)
            log.log(logging.ERROR if is_serious else logging.INFO, "%s", text, extra={"device": subject})

    def _is_news(self, subject: str, event: GpuEvent) -> bool:
        """Tell whether an error is worth a line: a program that fails may cause hundreds a second, on all GPUs in turn.

        They would be the only recent events left.
        """
        last = self._logged.get((subject, event.xid))
        if last is not None and event.at < last + SAME_SECONDS:
            return False
        if len(self._logged) >= MOST_REMEMBERED:
            self._logged.clear()
        self._logged[subject, event.xid] = event.at
        return True
