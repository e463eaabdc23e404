"""Metrics: what the agent counts itself (calls, commands, steps, actions, writes), and the facts that a scrape reads.

Durations are in milliseconds: the agent's promises are, and no reader has to multiply. Every label has a bounded set of
values; pod names occur in one info series only, which is bounded by the number of units. Facts come from a supplier at
scrape time, so nothing is counted twice and nothing goes stale.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial

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

from agent.config import Config
from agent.errors import AgentError
from agent.model.counters import Counters
from agent.report.facts import Facts
from agent.report.series import Adapters, FactsCollector, joined
from agent.state import Latest

MILLISECONDS = (0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000)
CNI_COMMANDS = frozenset({"ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"})


class Observation:
    """One request, timed while its `with` block runs. No generator, which takes as long as many a request."""

    __slots__ = ("_clock", "_histogram", "_labels", "_start", "outcome")

    def __init__(self, histogram: Histogram, labels: tuple[str, ...], clock: Callable[[], float]) -> None:
        """The outcome is the last label."""
        self._histogram = histogram
        self._labels = labels
        self._clock = clock
        self.outcome = "ok"
        """A door that answers an error instead of raising it names it here."""

    def __enter__(self) -> Observation:
        self._start = self._clock()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.outcome = outcome_of(error)
        self._histogram.labels(*self._labels, self.outcome).observe((self._clock() - self._start) * 1000)


class Metrics:
    """The agent's instruments, registered in the registry passed in."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.perf_counter) -> None:
        # They are a series more for each instrument, that nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry
        self._clock = clock
        self._adapters: Adapters | None = None
        timed = partial(Histogram, buckets=MILLISECONDS, registry=registry)
        counted = partial(Counter, registry=registry)
        self._rpc = timed(
            "nodefabric_rpc_duration_milliseconds",
            "Time to answer kubelet, by call, resource (for claims the driver) and outcome (ok, or the reason).",
            ("operation", "resource", "outcome"),
        )
        self._cni = timed(
            "nodefabric_cni_duration_milliseconds",
            "Time to answer a CNI command, by command and outcome (ok, or the error's reason).",
            ("command", "outcome"),
        )
        self._steps = timed(
            "nodefabric_cni_step_duration_milliseconds",
            "Time that the steps of an ADD took, by step (plan, books, device, ipam, addresses).",
            ("step",),
        )
        self._reconcile = counted(
            "nodefabric_reconcile_actions",
            "What the reconciler repaired, and why.",
            ("action", "reason"),
        )
        self._heal_failures = counted(
            "nodefabric_healer_failures",
            "Rounds of the reconciler in which this healer ended early.",
            ("healer",),
        )
        self._writes = counted(
            "nodefabric_api_writes",
            "Writes to the API server, by object and outcome (accepted, or the error's reason).",
            ("object", "outcome"),
        )
        self._spooled = counted(
            "nodefabric_spooled_requests",
            "CNI requests that the relay kept on disk while the agent was away, and that were replayed.",
        )
        self._reloads = counted(
            "nodefabric_config_reload",
            "New configurations, by outcome (applied, partly, unchanged, refused).",
            ("outcome",),
        )
        self._reloaded = Gauge(
            "nodefabric_config_last_reload_success",
            "1 while the newest configuration is in effect as far as it can be, 0 if it was refused.",
            registry=registry,
        )
        self._reloaded.set(1)
        self._overlaps = Gauge(
            "nodefabric_overlapping_devices",
            "Devices that two resources select; the first of them has each.",
            registry=registry,
        )
        self._conflicts = counted(
            "nodefabric_dra_conflicts",
            "Claims not prepared because another claim or pod had a device of theirs.",
            ("holder",),
        )
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

    def observe(self, operation: str, resource: str) -> Observation:
        """Time one call from kubelet. Its outcome is that of the block, unless the block names one."""
        return Observation(self._rpc, (operation, resource), self._clock)

    def observe_steps(self, seconds: Mapping[str, float]) -> None:
        """Count what the steps of an ADD took."""
        for step, taken in seconds.items():
            self._steps.labels(step).observe(taken * 1000)

    def observe_cni(self, command: str) -> Observation:
        """Time one CNI command. A command that CNI does not know counts as `other`."""
        known = command if command in CNI_COMMANDS else "other"
        return Observation(self._cni, (known,), self._clock)

    def reloaded(self, outcome: str) -> None:
        """Count a new version of the configuration."""
        self._reloads.labels(outcome).inc()
        self._reloaded.set(outcome != "refused")

    def overlapping(self, devices: int) -> None:
        """Show how many devices two resources select."""
        self._overlaps.set(devices)

    def reconciled(self, action: str, reason: str) -> None:
        """Count an action of the reconciler. Both are words of its own, never names."""
        self._reconcile.labels(action, reason).inc()

    def heal_failed(self, healer: str) -> None:
        """Count a healer that ended early."""
        self._heal_failures.labels(healer).inc()

    def claim_conflict(self, holder: str) -> None:
        """Count a claim that was not prepared since a device was in the hands of another claim, or of a pod."""
        self._conflicts.labels(holder).inc()

    def api_write(self, kind: str, outcome: str) -> None:
        """Count a write to the API server."""
        self._writes.labels(kind, outcome).inc()

    def spooled(self, count: int = 1) -> None:
        """Count requests replayed from the spool."""
        self._spooled.inc(count)

    def add_facts(self, supplier: Callable[[], Facts], version: str) -> None:
        """Read `supplier` at each scrape, from the scraping thread."""
        self.registry.register(FactsCollector(supplier, version))

    def add_adapters(self, read: Callable[[], Counters], config: Latest[Config]) -> None:
        """Read what adapters count at each scrape, from the scraping thread."""
        self._adapters = Adapters(read, config)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Return content type and text of all series, in the format that `accept` asks for."""
        encode, content_type = choose_encoder(accept)
        families = self._adapters.families() if self._adapters is not None else ()
        return content_type, joined(content_type, encode(self.registry), families)


def outcome_of(error: BaseException) -> str:
    """Return the outcome label of a request that ended in this error."""
    if isinstance(error, AgentError):
        return error.reason
    return "Cancelled" if isinstance(error, asyncio.CancelledError) else "Internal"
