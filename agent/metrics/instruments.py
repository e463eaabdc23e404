"""What the agent counts itself: calls, commands, steps, actions, writes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agent.errors import AgentError
from agent.metrics.adapters import Adapters
from agent.metrics.exposition import joined
from agent.metrics.facts import Facts, FactsCollector
from agent.model.counters import Counters

MILLISECONDS = (0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000)
CNI_COMMANDS = frozenset({"ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"})
MOST_PENDING = 1000


class Observation:
    """One request, timed while its `with` block runs. No generator, which takes as long as many a request."""

    __slots__ = ("_clock", "_record", "_start", "outcome")

    def __init__(self, record: Callable[[str, float], None], clock: Callable[[], float]) -> None:
        """`record` is told the outcome and the milliseconds."""
        self._record = record
        self._clock = clock
        self.outcome = "ok"
        """A door that answers an error instead of raising it names it here."""

    def __enter__(self) -> Observation:
        self._start = self._clock()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.outcome = outcome_of(error)
        self._record(self.outcome, (self._clock() - self._start) * 1000)


class Metrics:
    """The agent's instruments, registered in the registry passed in."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.perf_counter) -> None:
        # They are a series more for each instrument, that nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry
        self._clock = clock
        self._pending = _Pending()
        self._adapters: Adapters | None = None
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

    def observe(self, operation: str, resource: str) -> Observation:
        """Time one call from kubelet. Its outcome is that of the block, unless the block names one."""

        def record(outcome: str, taken: float) -> None:
            self._pending.add(lambda: self._rpc.labels(operation, resource, outcome).observe(taken))

        return Observation(record, self._clock)

    def observe_steps(self, seconds: Mapping[str, float]) -> None:
        """Count what the steps of an ADD took."""

        def record() -> None:
            for step, taken in seconds.items():
                self._steps.labels(step).observe(taken * 1000)

        self._pending.add(record)

    def observe_cni(self, command: str) -> Observation:
        """Time one CNI command. A command that CNI does not know counts as `other`."""
        known = command if command in CNI_COMMANDS else "other"

        def record(outcome: str, taken: float) -> None:
            self._pending.add(lambda: self._cni.labels(known, outcome).observe(taken))

        return Observation(record, self._clock)

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

    def add_adapters(self, read: Callable[[], Counters], aliases: Callable[[], bool]) -> None:
        """Read what adapters count at each scrape, from the scraping thread.

        `aliases` tells whether the names of sriov-network-metrics-exporter are wanted besides ours.
        """
        self._adapters = Adapters(read, aliases=aliases)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Return content type and text of all series, in the format that `accept` asks for."""
        encode, content_type = choose_encoder(accept)
        families = self._adapters.families() if self._adapters is not None else ()
        return content_type, joined(content_type, encode(self.registry), families)


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
