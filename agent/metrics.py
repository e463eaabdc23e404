"""Metrics: what the agent counts itself, and the facts a scrape reads.

Owns the names, labels and units of all `nodefabric_*` series. Durations are in milliseconds: the
agent's promises are, and no reader has to multiply. Every label has a bounded set of values; pod
names occur in one info series only, which is bounded by the number of units.

Facts come from a supplier at scrape time, so nothing is counted twice and nothing goes stale.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agent.errors import AgentError
from agent.model.allocation import Attachment, AttachmentState, Grant, OwedLease, Quarantine
from agent.model.device import Snapshot
from agent.model.unit import OfferedUnit

MILLISECONDS = (0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000)
CNI_COMMANDS = frozenset({"ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"})
PCI_CLASS_NETWORK = 0x02
MOST_PENDING = 1000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a scrape reads."""

    snapshot: Snapshot
    units: Mapping[str, Sequence[OfferedUnit]] = field(default_factory=lambda: MappingProxyType({}))
    """Resource name → its units, also for a resource that has none."""
    grants: tuple[Grant, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    quarantines: tuple[Quarantine, ...] = ()
    scan_milliseconds: float = 0.0
    owed_leases: tuple[OwedLease, ...] = ()


@dataclass(slots=True)
class Observation:
    """What became of one request. A door that answers an error instead of raising it names it here."""

    outcome: str = "ok"


class Metrics:
    """The agent's instruments, registered in the registry passed in."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.perf_counter) -> None:
        self.registry = registry
        self._clock = clock
        self._pending = _Pending()
        registry.register(self._pending)
        self._rpc = Histogram(
            "nodefabric_rpc_duration_milliseconds",
            "Time to answer kubelet, by call, resource and outcome (ok, or the error's reason).",
            ("operation", "resource", "outcome"),
            buckets=MILLISECONDS,
            registry=registry,
        )
        self._cni = Histogram(
            "nodefabric_cni_duration_milliseconds",
            "Time to answer a CNI command, by command and outcome (ok, or the error's reason).",
            ("command", "outcome"),
            buckets=MILLISECONDS,
            registry=registry,
        )
        self._steps = Histogram(
            "nodefabric_cni_step_duration_milliseconds",
            "Time that the steps of an ADD took, by step (plan, books, device, ipam, addresses).",
            ("step",),
            buckets=MILLISECONDS,
            registry=registry,
        )
        self._reconcile = Counter(
            "nodefabric_reconcile_actions",
            "What the reconciler did to heal the node, and why.",
            ("action", "reason"),
            registry=registry,
        )
        self._writes = Counter(
            "nodefabric_api_writes",
            "Writes to the API server, by object and outcome (accepted, or the error's reason).",
            ("object", "outcome"),
            registry=registry,
        )
        self._spooled = Counter(
            "nodefabric_spooled_requests",
            "CNI requests that the relay put on disk while the agent was away, and that were replayed.",
            registry=registry,
        )
        self._reloads = Counter(
            "nodefabric_config_reload",
            "New versions of the configuration, by outcome (applied, partly, unchanged, refused, failed).",
            ("outcome",),
            registry=registry,
        )
        self._reloaded = Gauge(
            "nodefabric_config_last_reload_success",
            "1 while the newest version of the configuration is in effect as far as it can be, 0 if it was refused.",
            registry=registry,
        )
        self._reloaded.set(1)
        self._overlaps = Gauge(
            "nodefabric_overlapping_devices",
            "Devices that two resources select; the first of them has each.",
            registry=registry,
        )
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

    @contextmanager
    def observe(self, operation: str, resource: str = "") -> Iterator[Observation]:
        """Time one call from kubelet. Its outcome is that of the block, unless the block names one."""
        with self._timed(lambda outcome, ms: self._rpc.labels(operation, resource, outcome).observe(ms)) as seen:
            yield seen

    def observe_steps(self, milliseconds: Mapping[str, float]) -> None:
        """Count what the steps of an ADD took."""

        def record() -> None:
            for step, taken in milliseconds.items():
                self._steps.labels(step).observe(taken)

        self._pending.add(record)

    @contextmanager
    def observe_cni(self, command: str) -> Iterator[Observation]:
        """Time one CNI command. A command that CNI does not know counts as `other`."""
        known = command if command in CNI_COMMANDS else "other"
        with self._timed(lambda outcome, ms: self._cni.labels(known, outcome).observe(ms)) as seen:
            yield seen

    @contextmanager
    def _timed(self, record: Callable[[str, float], None]) -> Iterator[Observation]:
        seen = Observation()
        start = self._clock()
        try:
            yield seen
        except BaseException as error:
            seen.outcome = outcome_of(error)
            raise
        finally:
            taken = (self._clock() - start) * 1000
            self._pending.add(lambda: record(seen.outcome, taken))

    def reloaded(self, outcome: str) -> None:
        """Count a new version of the configuration."""
        self._reloads.labels(outcome).inc()
        self._reloaded.set(outcome not in ("refused", "failed"))

    def overlapping(self, devices: int) -> None:
        """Tell how many devices two resources select."""
        self._overlaps.set(devices)

    def reconciled(self, action: str, reason: str) -> None:
        """Count an action of the reconciler. Both are words of its own, never names."""
        self._reconcile.labels(action, reason).inc()

    def api_write(self, kind: str, outcome: str) -> None:
        """Count a write to the API server."""
        self._writes.labels(kind, outcome).inc()

    def spooled(self, count: int = 1) -> None:
        """Count requests replayed from the spool."""
        self._spooled.inc(count)

    def add_facts(self, supplier: Callable[[], Facts], version: str) -> None:
        """Read `supplier` at each scrape, from the scraping thread."""
        self.registry.register(FactsCollector(supplier, version))

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Return content type and text of all series, in the format that `accept` asks for."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self.registry)


class _Pending(Collector):
    """Observations that are counted when somebody looks: neither a pod nor kubelet waits for a histogram.

    Registered before the instruments, so a scrape counts them before it reads.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, record: Callable[[], None]) -> None:
        """Keep an observation for later. If nobody ever looks, there is an end to that."""
        self._waiting.append(record)
        if len(self._waiting) > MOST_PENDING:
            self.count()

    def count(self) -> None:
        """Count what waits."""
        while True:
            try:
                record = self._waiting.popleft()
            except IndexError:
                return
            record()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        self.count()
        return ()


def outcome_of(error: BaseException) -> str:
    """Return the outcome label of a request that ended in this error."""
    if isinstance(error, AgentError):
        return error.reason
    return "Cancelled" if isinstance(error, asyncio.CancelledError) else "Internal"


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
        "nodefabric_quarantined_devices",
        "Devices withheld because their clean-up could not be verified.",
        "reason",
        Tally(q.reason for q in facts.quarantines),
    )
    yield _single(
        "nodefabric_owed_leases",
        "Interfaces that are gone, whose addresses the IPAM plugin has not taken back yet.",
        len(facts.owed_leases),
    )
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
        elif device.pci_class >> 16 == PCI_CLASS_NETWORK:
            kinds["nic"] += 1
        kinds["rdma"] += len(device.rdma_devices)
    kinds["gpu"] = len(snapshot.gpus)
    return kinds


def _unit_families(facts: Facts) -> Iterator[Metric]:
    grants = {grant.unit_id: grant for grant in facts.grants}
    attached = {a.device for a in facts.attachments if a.state is AttachmentState.ATTACHED}
    states = {(name, state): 0 for name in facts.units for state in _STATES}
    reasons: Tally[tuple[str, str]] = Tally()
    info = GaugeMetricFamily(
        "nodefabric_allocation_info",
        "1 for each unit that a pod holds: join it on pod and namespace.",
        labels=("namespace", "pod", "resource", "unit", "device", "numa_node"),
    )
    for name, units_of in facts.units.items():
        for unit in units_of:
            states[name, "healthy" if unit.health.healthy else "unhealthy"] += 1
            states[name, "granted"] += unit.unit_id in grants
            states[name, "attached"] += unit.device in attached
            if not unit.health.healthy:
                reasons[name, unit.health.reason] += 1
            grant = grants.get(unit.unit_id)
            if grant is not None and grant.pod is not None:
                pod = grant.pod
                where = str(unit.numa_node)
                info.add_metric((pod.namespace, pod.name, name, unit.unit_id, unit.device, where), 1)
    units = GaugeMetricFamily(
        "nodefabric_units",
        "Units by resource and state. Healthy and unhealthy add up to all units;"
        " granted and attached count some of these again.",
        labels=("resource", "state"),
    )
    for labels, value in sorted(states.items()):
        units.add_metric(labels, value)
    unhealthy = GaugeMetricFamily(
        "nodefabric_unit_unhealthy", "Unhealthy units by resource and reason.", labels=("resource", "reason")
    )
    for labels, value in sorted(reasons.items()):
        unhealthy.add_metric(labels, value)
    yield from (units, unhealthy, info)


_STATES = ("healthy", "unhealthy", "granted", "attached")


def _tally(name: str, text: str, label: str, counts: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for key, value in sorted(counts.items()):
        family.add_metric((key,), value)
    return family


def _single(name: str, text: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text)
    family.add_metric((), value)
    return family
