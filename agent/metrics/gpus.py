"""Series about GPUs, as the last scan saw them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from agent.model.device import Snapshot


def gpu_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Build the series of GPUs and of their MIG slices."""
    gpus = snapshot.gpus
    available = GaugeMetricFamily(
        "nodefabric_gpu_monitor_available",
        "0 if the NVIDIA driver's library does not answer: what is told of GPUs is then as it was known last.",
    )
    available.add_metric((), not any(problem.path == "nvml" for problem in snapshot.problems))
    info = GaugeMetricFamily(
        "nodefabric_gpu_info",
        "1 for each GPU.",
        labels=("gpu", "device", "name", "index", "mig", "fabric_clique"),
    )
    memory = GaugeMetricFamily(
        "nodefabric_gpu_memory_bytes", "Memory of a GPU or of a MIG slice.", labels=("gpu", "mig_device", "profile")
    )
    peers = GaugeMetricFamily(
        "nodefabric_gpu_nvlink_peers", "GPUs of this node that the GPU reaches by NVLink.", labels=("gpu",)
    )
    ailment = GaugeMetricFamily(
        "nodefabric_gpu_ailment", "1 for each thing that is wrong with a GPU now.", labels=("gpu", "reason")
    )
    for gpu in gpus:
        mig = "enabled" if gpu.mig_mode else "disabled"
        info.add_metric((gpu.uuid, gpu.pci_address, gpu.name, str(gpu.index), mig, gpu.fabric_clique), 1)
        memory.add_metric((gpu.uuid, "", ""), gpu.memory_bytes)
        for slice_ in gpu.mig_devices:
            memory.add_metric((gpu.uuid, slice_.uuid, slice_.profile), slice_.memory_bytes)
        peers.add_metric((gpu.uuid,), len(gpu.nvlinks))
        for reason in gpu.ailments:
            ailment.add_metric((gpu.uuid, reason), 1)
    yield from (available, info, memory, peers, ailment)
