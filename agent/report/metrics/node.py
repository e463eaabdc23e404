"""The node's state as series: units, attachments, quarantine, devices. Read when somebody scrapes."""

from __future__ import annotations

import logging
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agent.errors import AgentError
from agent.model.allocation import Attachment, AttachmentState, Claim, ClaimState
from agent.model.device import NO_NUMA_NODE, Snapshot, is_pci_address
from agent.report.facts import DriverState, Facts
from agent.report.metrics.gpus import gpu_families

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
        available = GaugeMetricFamily("nodefabric_facts_available", "1 if the series about the node could be read.")
        try:
            facts = self._supplier()
        except AgentError as error:
            if self._failing != error.reason:
                self._failing = error.reason
                log.warning("metrics about the node are left out: %s", error, extra={"reason": error.reason})
            available.add_metric((), 0)
            yield available
            return
        self._failing = None
        available.add_metric((), 1)
        yield available
        yield from families(facts)


def families(facts: Facts) -> Iterator[Metric]:
    """Build the series about the node from facts."""
    yield from _unit_families(facts)
    yield _tally(
        "nodefabric_attachments",
        "Devices in pods, by state of the move.",
        "state",
        {state.value: 0 for state in AttachmentState} | Tally(a.state.value for a in facts.attachments),
    )
    yield _tally(
        "nodefabric_obstacle",
        "1 for each condition that keeps the agent from some of its work; /status says more.",
        "check",
        dict.fromkeys(facts.conditions, 1),
    )
    yield _tally(
        "nodefabric_quarantined_devices",
        "Devices not offered because they could not be put back.",
        "reason",
        # What comes after the colon names the device and what the kernel said: too many words for a label.
        Tally(q.reason.partition(":")[0] for q in facts.quarantines),
    )
    yield _single(
        "nodefabric_owed_leases",
        "Removed interfaces whose addresses the IPAM plugin has not taken back yet.",
        len(facts.owed_leases),
    )
    offered = GaugeMetricFamily(
        "nodefabric_adapter_offered",
        "1 for each adapter that a resource offers, itself or as VFs.",
        labels=("resource", "device"),
    )
    for pair in sorted(facts.adapters):
        offered.add_metric(pair, 1)
    yield offered
    yield from gpu_families(facts.snapshot)
    yield from claim_families(facts.driver, facts.claims, facts.attachments)
    if facts.exporter_names:
        yield _pod_devices(facts)
    yield _tally("nodefabric_devices", "What the last scan found, by kind.", "kind", device_kinds(facts.snapshot))
    yield _single("nodefabric_scan_duration_milliseconds", "Time the last scan took.", facts.scan_milliseconds)
    yield _single("nodefabric_scan_problems", "Things the last scan could not read.", len(facts.snapshot.problems))


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
    units = GaugeMetricFamily(
        "nodefabric_units",
        "Units by resource and state: healthy and unhealthy are all; granted and attached count some of them again.",
        labels=("resource", "state"),
    )
    for labels, value in sorted(states.items()):
        units.add_metric(labels, value)
    unhealthy = GaugeMetricFamily(
        "nodefabric_unit_unhealthy", "Unhealthy units by resource and reason.", labels=("resource", "reason")
    )
    for labels, value in sorted(reasons.items()):
        unhealthy.add_metric(labels, value)
    yield from (units, unhealthy, _allocations(facts))


def _allocations(facts: Facts) -> Metric:
    """Tell which pod has which unit, whether a resource still offers it or not, and which device without one."""
    family = GaugeMetricFamily(
        "nodefabric_allocation_info",
        "1 for each unit, claimed device, or device brought in by CNI alone, that a pod holds: join it on device.",
        labels=("namespace", "pod", "container", "resource", "unit", "device", "numa_node"),
    )
    offered = {unit.unit_id: unit for units in facts.units.values() for unit in units}
    for grant in facts.grants:
        if (pod := grant.pod) is not None:
            unit = offered.get(grant.unit_id)
            numa_node = unit.numa_node if unit is not None else _numa_node(facts.snapshot, grant.device)
            where = pod.namespace, pod.name, facts.containers.get(grant.unit_id, "")
            for device in grant.devices or ("",):
                family.add_metric((*where, grant.resource_name, grant.unit_id, device, str(numa_node)), 1)
    granted = {device for grant in facts.grants for device in grant.devices}
    for named, resource, device in dict.fromkeys(_without_units(facts)):
        if is_pci_address(device) and device not in granted:
            numa_node = _numa_node(facts.snapshot, device)
            family.add_metric((*named, "", resource, "", device, str(numa_node)), 1)
    return family


def _without_units(facts: Facts) -> Iterator[tuple[tuple[str, str], str, str]]:
    """List who has devices without kubelet having granted a unit: (namespace and name of the pod, resource, device)."""
    for row in facts.attachments:
        yield (row.owner.pod.namespace, row.owner.pod.name), row.resource_name, row.device
    for claim in facts.claims:
        for pod in claim.pods:
            yield from (((pod.namespace, pod.name), found.resource_name, found.device) for found in claim.devices)


def _numa_node(snapshot: Snapshot, address: str) -> int:
    device = snapshot.by_address.get(address)
    return device.numa_node if device is not None else NO_NUMA_NODE


_STATES = ("healthy", "unhealthy", "granted", "attached")


def _pod_devices(facts: Facts) -> Metric:
    """Tell which pod has which PCI device, as sriov-network-metrics-exporter does."""
    family = UnknownMetricFamily(
        "sriov_kubepoddevice",
        "The same as nodefabric_allocation_info, for PCI devices.",
        labels=("pciAddr", "dev_type", "pod", "namespace", "container"),
    )
    found = [
        (device, g.resource_name, g.pod.name, g.pod.namespace, facts.containers.get(g.unit_id, ""))
        for g in facts.grants
        for device in g.devices
        if g.pod is not None and is_pci_address(device)
    ]
    for labels in dict.fromkeys(found):  # shares of one HCA differ in nothing that the exporter tells
        family.add_metric(labels, 1)
    return family


def _tally(name: str, text: str, label: str, counts: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for key, value in sorted(counts.items()):
        family.add_metric((key,), value)
    return family


def _single(name: str, text: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text)
    family.add_metric((), value)
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
    family = GaugeMetricFamily(
        "nodefabric_dra_claims",
        "Claims that kubelet had prepared, by resource and state; attached: prepared, with an interface in a pod.",
        labels=("resource", "state"),
    )
    for labels, count in sorted(counts.items()):
        family.add_metric(labels, count)
    yield family
    leaving = [claim.since for claim in claims if claim.state is ClaimState.UNPREPARING]
    family = GaugeMetricFamily(
        "nodefabric_dra_unpreparing_since_seconds",
        "When kubelet first asked to unprepare the claim that is longest on its way back, in seconds since the epoch.",
    )
    if leaving:
        family.add_metric((), min(leaving))
    yield family


def _driver_families(driver: DriverState) -> Iterator[Metric]:
    registered = GaugeMetricFamily(
        "nodefabric_dra_registered", "1 while kubelet has the DRA driver registered, else 0.", labels=("driver",)
    )
    registered.add_metric((driver.name,), driver.is_registered)
    yield registered
    if driver.slices is not None:
        yield GaugeMetricFamily(
            "nodefabric_dra_slices",
            "ResourceSlices of this node that the API server has as they should be.",
            value=driver.slices,
        )
    dropped = GaugeMetricFamily(
        "nodefabric_dra_dropped",
        "1 for each feature of ResourceSlices that the cluster leaves out (taints, capacity, listAttributes).",
        labels=("feature",),
    )
    for feature in sorted(driver.dropped):
        dropped.add_metric((feature,), 1)
    yield dropped
    devices = GaugeMetricFamily(
        "nodefabric_dra_devices",
        "Devices offered to claims, by resource and health (healthy, or the reason).",
        labels=("resource", "health"),
    )
    for resource, health, count in driver.devices:
        devices.add_metric((resource, health), count)
    yield devices
