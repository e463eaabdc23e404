"""What a scrape reads, as series: the node's state (units, devices in pods, GPUs, claims), and what adapters count.

The counters of RDMA ports and VFs are written out here: the client library takes ten microseconds for a sample, and a
node with a thousand VFs has fifteen thousand of them. Series of one device share their labels, which are written once.
Formats: Prometheus text 0.0.4 and OpenMetrics 1.0, where a counter's family has no suffix and its samples `_total`.
"""

from __future__ import annotations

import logging
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agent.config import Config
from agent.errors import AgentError
from agent.model.allocation import Attachment, AttachmentState, Claim, ClaimState
from agent.model.counters import Counters, RdmaPortCounters, VfCounters
from agent.model.device import NO_NUMA_NODE, Snapshot, is_pci_address
from agent.report.facts import DriverState, Facts
from agent.state import Latest

log = logging.getLogger(__name__)


class FactsCollector(Collector):
    """Turn the supplied facts into gauges.

    If they cannot be had (a ledger on a broken disk), the agent's own series are still served.
    """

    def __init__(self, supplier: Callable[[], Facts], version: str) -> None:
        self._supplier = supplier
        self._version = version
        self._failing: str | None = None
        """Reason of the last failure: it is said once, not at each scrape."""

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not read the facts: the parts they come from may not be open yet

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("nodefabric_build", "The agent's version.", value={"version": self._version})
        facts = None
        try:
            facts = self._supplier()
        except AgentError as error:
            if self._failing != error.reason:
                log.warning("metrics about the node are left out: %s", error, extra={"reason": error.reason})
            self._failing = error.reason
        yield _gauge("nodefabric_facts_available", "1 if the series about the node could be read.", facts is not None)
        if facts is not None:
            self._failing = None
            yield from families(facts)


def families(facts: Facts) -> Iterator[Metric]:
    """Build the series about the node from facts."""
    yield from _unit_families(facts)
    yield _gauge(
        "nodefabric_attachments",
        "Devices in pods, by state of the move.",
        {(state.value,): 0 for state in AttachmentState} | Tally((a.state.value,) for a in facts.attachments),
        "state",
    )
    yield _gauge(
        "nodefabric_obstacle",
        "1 for each condition that keeps the agent from some of its work; /status says more.",
        {(name,): 1 for name in facts.conditions},
        "check",
    )
    yield _gauge(
        "nodefabric_quarantined_devices",
        "Devices not offered because they could not be put back.",
        # What comes after the colon names the device and what the kernel said: too many words for a label.
        Tally((q.reason.partition(":")[0],) for q in facts.quarantines),
        "reason",
    )
    yield _gauge(
        "nodefabric_owed_leases",
        "Removed interfaces whose addresses the IPAM plugin has not taken back yet.",
        len(facts.owed_leases),
    )
    yield _gauge(
        "nodefabric_adapter_offered",
        "1 for each adapter that a resource offers, itself or as VFs.",
        dict.fromkeys(facts.adapters, 1),
        *("resource", "device"),
    )
    yield from gpu_families(facts.snapshot)
    yield from claim_families(facts.driver, facts.claims, facts.attachments)
    if facts.exporter_names:
        yield _pod_devices(facts)
    kinds = {(kind,): count for kind, count in device_kinds(facts.snapshot).items()}
    yield _gauge("nodefabric_devices", "What the last scan found, by kind.", kinds, "kind")
    yield _gauge("nodefabric_scan_duration_milliseconds", "Time the last scan took.", facts.scan_milliseconds)
    yield _gauge("nodefabric_scan_problems", "Things the last scan could not read.", len(facts.snapshot.problems))


def device_kinds(snapshot: Snapshot) -> dict[str, int]:
    """Count the devices by kind: PCI functions (pf, vf, nic), RDMA devices and GPUs."""
    kinds = dict.fromkeys(("gpu", "nic", "pf", "rdma", "vf"), 0)
    for device in snapshot.devices:
        if device.is_vf:
            kinds["vf"] += 1
        elif device.is_pf:
            kinds["pf"] += 1
        elif device.is_network:
            kinds["nic"] += 1
        kinds["rdma"] += len(device.rdma_devices)
    kinds["gpu"] = len(snapshot.all_gpus)
    return kinds


def _unit_families(facts: Facts) -> Iterator[Metric]:
    granted = facts.granted
    attached = {a.device for a in facts.attachments if a.state is AttachmentState.ATTACHED}
    states = {(name, state): 0 for name in facts.units for state in _STATES}
    reasons: Tally[tuple[str, str]] = Tally()
    for name, units_of in facts.units.items():
        for unit in units_of:
            states[name, "healthy" if unit.health.healthy else "unhealthy"] += 1
            states[name, "granted"] += unit.unit_id in granted
            states[name, "attached"] += not attached.isdisjoint(unit.devices)
            if not unit.health.healthy:
                reasons[name, unit.health.reason] += 1
    yield _gauge(
        "nodefabric_units",
        "Units by resource and state: healthy and unhealthy are all; granted and attached count some of them again.",
        states,
        *("resource", "state"),
    )
    yield _gauge("nodefabric_unit_unhealthy", "Unhealthy units by resource and reason.", reasons, "resource", "reason")
    yield _gauge(
        "nodefabric_allocation_info",
        "1 for each unit, claimed device, or device brought in by CNI alone, that a pod holds: join it on device.",
        dict.fromkeys(_allocations(facts), 1),
        *("namespace", "pod", "container", "resource", "unit", "device", "numa_node"),
    )


def _allocations(facts: Facts) -> Iterator[tuple[str, ...]]:
    """List which pod has which unit, whether a resource still offers it or not, and which device without one."""
    offered = {unit.unit_id: unit for units in facts.units.values() for unit in units}
    granted = {device for hold in facts.holds for device in hold.devices}
    for each in facts.held:
        unit_id = each.hold.key if each.hold is not None and not each.hold.claim_uid else ""
        device = each.row.parent if each.row is not None and each.hold is not None else each.device
        # Of what is granted anew before its former pod has let it go two series would fit a join on the device.
        if unit_id or (is_pci_address(device) and device not in granted):
            unit = offered.get(unit_id)
            numa_node = unit.numa_node if unit is not None else _numa_node(facts.snapshot, device)
            for pod in each.pods:
                where = pod.namespace, pod.name, each.container
                yield (*where, each.resource_name, unit_id, device, str(numa_node))


def _numa_node(snapshot: Snapshot, address: str) -> int:
    device = snapshot.by_address.get(address)
    return device.numa_node if device is not None else NO_NUMA_NODE


_STATES = ("healthy", "unhealthy", "granted", "attached")


def _pod_devices(facts: Facts) -> Metric:
    """List which pod has which PCI device, as sriov-network-metrics-exporter does."""
    family = UnknownMetricFamily(
        "sriov_kubepoddevice",
        "The same as nodefabric_allocation_info, for PCI devices.",
        labels=("pciAddr", "dev_type", "pod", "namespace", "container"),
    )
    found = (
        (device, resource, pod, namespace, container)
        for namespace, pod, container, resource, _, device, _ in _allocations(facts)
        if is_pci_address(device)
    )
    for labels in dict.fromkeys(found):  # shares of one HCA differ in nothing that the exporter shows
        family.add_metric(labels, 1)
    return family


def _gauge(name: str, text: str, samples: float | Mapping[Any, float], *labels: str) -> GaugeMetricFamily:
    """Build a gauge: of a number, or of one for each tuple of labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in sorted(samples.items()) if isinstance(samples, Mapping) else [((), samples)]:
        family.add_metric(values, number)
    return family


STATES = ("attached", *(state.value for state in ClaimState))


def claim_families(
    driver: DriverState | None, claims: Sequence[Claim], attachments: Iterable[Attachment]
) -> Iterator[Metric]:
    """Build the series about claims and the DRA driver: none where nothing is offered to claims, and none is left."""
    if driver is not None:
        yield from _driver_families(driver)
    if driver is None and not claims:
        return
    attached = {row.claim_uid for row in attachments if row.state is AttachmentState.ATTACHED}
    resources = {resource for resource, _, _ in driver.devices} if driver is not None else set()
    counts = Tally({(resource, state): 0 for resource in resources for state in STATES})
    for claim in claims:
        is_attached = claim.state is ClaimState.PREPARED and claim.ref.uid in attached
        state = "attached" if is_attached else claim.state.value
        counts.update({(found.resource_name, state) for found in claim.devices})
    yield _gauge(
        "nodefabric_dra_claims",
        "Claims that kubelet had prepared, by resource and state; attached: prepared, with an interface in a pod.",
        counts,
        *("resource", "state"),
    )
    leaving = [claim.since for claim in claims if claim.state is ClaimState.UNPREPARING]
    yield _gauge(
        "nodefabric_dra_unpreparing_since_seconds",
        "When kubelet first asked to unprepare the claim that is longest on its way back, in seconds since the epoch.",
        min(leaving) if leaving else {},
    )


def _driver_families(driver: DriverState) -> Iterator[Metric]:
    yield _gauge(
        "nodefabric_dra_registered",
        "1 while kubelet has the DRA driver registered, else 0.",
        {(driver.name,): driver.is_registered},
        "driver",
    )
    if driver.slices is not None:
        text = "ResourceSlices of this node that the API server has as they should be."
        yield _gauge("nodefabric_dra_slices", text, driver.slices)
    yield _gauge(
        "nodefabric_dra_dropped",
        "1 for each feature of ResourceSlices that the cluster leaves out (taints, capacity, listAttributes).",
        {(feature,): 1 for feature in driver.dropped},
        "feature",
    )
    yield _gauge(
        "nodefabric_dra_devices",
        "Devices offered to claims, by resource and health (healthy, or the reason).",
        {(resource, health): count for resource, health, count in driver.devices},
        *("resource", "health"),
    )


def gpu_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Build the series of GPUs and of their MIG slices."""
    gpus = snapshot.all_gpus
    memory = {(gpu.uuid, "", ""): gpu.memory_bytes for gpu in gpus}
    yield _gauge(
        "nodefabric_gpu_monitor_available",
        "0 if the NVIDIA driver's library does not answer: series of GPUs are then as last seen.",
        not any(problem.path == "nvml" for problem in snapshot.problems),
    )
    yield _gauge(
        "nodefabric_gpu_info",
        "1 for each GPU of any vendor; without NVML, gpu is its PCI address.",
        {
            (g.uuid, g.pci_address, g.name, str(g.index), "enabled" if g.mig_mode else "disabled", g.fabric_clique): 1
            for g in gpus
        },
        *("gpu", "device", "name", "index", "mig", "fabric_clique"),
    )
    yield _gauge(
        "nodefabric_gpu_memory_bytes",
        "Memory of a GPU or of a MIG slice.",
        memory | {(gpu.uuid, mig.uuid, mig.profile): mig.memory_bytes for gpu in gpus for mig in gpu.mig_devices},
        *("gpu", "mig_device", "profile"),
    )
    yield _gauge(
        "nodefabric_gpu_nvlink_peers",
        "GPUs of this node that the GPU reaches by NVLink or xGMI.",
        {(gpu.uuid,): len(gpu.nvlinks) for gpu in gpus},
        "gpu",
    )
    yield _gauge(
        "nodefabric_gpu_ailment",
        "1 for each condition of a GPU.",
        {(gpu.uuid, reason): 1 for gpu in gpus for reason in gpu.ailments},
        *("gpu", "reason"),
    )
    yield _gauge(
        "nodefabric_adapter_nearness_unknown",
        "1 for each adapter whose nearness to GPUs is not known: its Data Direct function is not known.",
        {(device,): 1 for device in snapshot.data_direct.unknown} if gpus else {},
        "device",
    )


# ------------------------------------------------------------------------------------------- what adapters count


OPENMETRICS = "application/openmetrics-text"
END = b"# EOF\n"
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
WORD = 4
"""Bytes: what the data counters of a port count."""

_PORT = {
    "port_rcv_data": ("nodefabric_rdma_port_receive_bytes", "Bytes that came in through the port.", WORD),
    "port_xmit_data": ("nodefabric_rdma_port_transmit_bytes", "Bytes that went out through the port.", WORD),
    "port_rcv_packets": ("nodefabric_rdma_port_receive_packets", "Packets that came in through the port.", 1),
    "port_xmit_packets": ("nodefabric_rdma_port_transmit_packets", "Packets that went out through the port.", 1),
}
_VF = {
    "rx_bytes": ("nodefabric_vf_receive_bytes", "Bytes that the VF received."),
    "tx_bytes": ("nodefabric_vf_transmit_bytes", "Bytes that the VF sent."),
    "rx_packets": ("nodefabric_vf_receive_packets", "Packets that the VF received."),
    "tx_packets": ("nodefabric_vf_transmit_packets", "Packets that the VF sent."),
    "rx_broadcast": ("nodefabric_vf_receive_broadcast_packets", "Broadcast packets that the VF received."),
    "rx_multicast": ("nodefabric_vf_receive_multicast_packets", "Multicast packets that the VF received."),
    "rx_dropped": ("nodefabric_vf_receive_dropped_packets", "Packets to the VF that were dropped."),
    "tx_dropped": ("nodefabric_vf_transmit_dropped_packets", "Packets of the VF that were dropped."),
}


class Adapters:
    """Reads the counters and turns them into series. What cannot be read is left out, and said once."""

    def __init__(self, read: Callable[[], Counters], config: Latest[Config]) -> None:
        """`read` is called on the scraping thread.

        The configuration says whether the names of sriov-network-metrics-exporter are wanted besides ours.
        """
        self._read = read
        self._config = config
        self._failing: str | None = None

    def families(self) -> tuple[Family, ...]:
        """Read and build all series."""
        try:
            found = self._read()
        except AgentError as error:
            if self._failing != error.reason:
                self._failing = error.reason
                log.warning("counters of adapters are left out: %s", error, extra={"reason": error.reason})
            return ()
        self._failing = None
        aliases = alias_families(found.vfs) if self._config.value.endpoints.exporter_names else ()
        return (*port_families(found.rdma), *vf_families(found.vfs), *aliases)


def port_families(ports: tuple[RdmaPortCounters, ...]) -> Iterator[Family]:
    """Build the series of RDMA ports."""
    named = [(port, labels(device=port.device, rdma_device=port.rdma_device, port=port.port)) for port in ports]
    yield Family(
        "nodefabric_rdma_port_active",
        "gauge",
        "1 if the port's state is ACTIVE, else 0.",
        [(where, int(port.active)) for port, where in named],
    )
    for kind, (name, text, unit) in _PORT.items():
        samples = [(where, port.standard[kind] * unit) for port, where in named if kind in port.standard]
        yield Family(name, "counter", text, samples)
    yield Family(
        "nodefabric_rdma_port_events",
        "counter",
        "Other counters of the port (sysfs counters).",
        [
            (f"{where},{labels(event=kind)}", value)
            for port, where in named
            for kind, value in port.standard.items()
            if kind not in _PORT
        ],
    )
    yield Family(
        "nodefabric_rdma_hw_events",
        "counter",
        "The driver's counters of the port (sysfs hw_counters).",
        [(f"{where},{labels(event=kind)}", value) for port, where in named for kind, value in port.hardware.items()],
    )


def vf_families(vfs: tuple[VfCounters, ...]) -> Iterator[Family]:
    """Build the series of VFs."""
    named = [(vf, labels(device=vf.device, pf=vf.pf, vf=vf.vf_index, numa_node=vf.numa_node)) for vf in vfs]
    for field, (name, text) in _VF.items():
        yield Family(name, "counter", text, _samples(named, field))


def alias_families(vfs: tuple[VfCounters, ...]) -> Iterator[Family]:
    """Build the same series under the names of sriov-network-metrics-exporter.

    It calls them counters without the suffix that OpenMetrics asks for; of no type, the names can stay.
    """
    named = [(vf, labels(pf=vf.pf, vf=vf.vf_index, pciAddr=vf.device, numa_node=vf.numa_node)) for vf in vfs]
    for field, (name, _) in _VF.items():
        yield Family(f"sriov_vf_{field}", "unknown", f"The same as {name}_total.", _samples(named, field))


def _samples(named: list[tuple[VfCounters, str]], field: str) -> list[tuple[str, int]]:
    return [(where, value) for vf, where in named if (value := vf.traffic.get(field)) is not None]


@dataclass(frozen=True, slots=True)
class Family:
    """Series of one name."""

    name: str
    """Without `_total`."""
    kind: str
    """counter, gauge or unknown"""
    text: str
    """One line of help."""
    samples: Sequence[tuple[str, int]]
    """Labels as `labels` writes them, and the value."""


def labels(**values: object) -> str:
    """Write labels out: device="0000:3b:00.2",vf="1"."""
    return ",".join(f'{name}="{str(value).translate(_ESCAPED)}"' for name, value in values.items())


def write(families: Iterable[Family], content_type: str) -> bytes:
    """Write families in the format of a content type, without the end mark of OpenMetrics."""
    open_metrics = content_type.startswith(OPENMETRICS)
    parts: list[str] = []
    for family in families:
        sample = f"{family.name}_total" if family.kind == "counter" else family.name
        name = family.name if open_metrics else sample
        kind = "untyped" if family.kind == "unknown" and not open_metrics else family.kind
        parts.append(f"# HELP {name} {family.text}\n# TYPE {name} {kind}\n")
        parts += [f"{sample}{{{labels}}} {value}\n" for labels, value in family.samples]
    return "".join(parts).encode()


def joined(content_type: str, text: bytes, families: Iterable[Family]) -> bytes:
    """Put families behind a text that the client library wrote."""
    end = END if content_type.startswith(OPENMETRICS) else b""
    return text.removesuffix(END) + write(families, content_type) + end
