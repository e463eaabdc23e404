"""Where the parts leave word of what they do and find: for metrics, the recent events, /readyz, and health."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry, Counter

from agent.errors import AgentError, ClaimConflict, DeviceBusy
from agent.health_history import HealthHistory
from agent.model.allocation import ClaimRef, PodRef
from agent.model.device_health import UNKNOWN_XID, XID_REASONS, XIDS, GpuEvent
from agent.process.conditions import Conditions
from agent.report.events import Events
from agent.report.facts import DriverState
from agent.report.metrics import Metrics
from agent.state import Latest
from cni.call import Observer

SAME_SECONDS = 60.0
"""The same error of a GPU is logged and noted once in so long; all are counted."""
MOST_REMEMBERED = 1000

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report(Observer):
    """The agent's accounts. Any thread may tell them something."""

    metrics: Metrics
    conditions: Conditions
    events: Events
    health: HealthHistory
    """What is remembered of the devices' health, and whether anything may be offered at all."""
    driver: Latest[DriverState | None] = field(default_factory=partial(Latest[DriverState | None], None))
    """Of claims; None while it does not run."""

    def claim_failed(self, ref: ClaimRef, what: str, error: AgentError) -> None:
        """Count a claim's device that was in other hands to the end, and note any failure, the same again once."""
        cause = error.__cause__ if isinstance(error, DeviceBusy) else error
        if isinstance(cause, ClaimConflict):
            self.metrics.claim_conflict("pod" if cause.how.startswith(("granted", "attached")) else "claim")
        self.events.claim_failed(ref, f"{what}: {error}")

    def reconciled(self, action: str, reason: str) -> None:
        """Count what was brought into accord, and note it among the recent events."""
        self.metrics.reconciled(action, reason)
        self.events.reconciled(action, reason)

    def not_told(self, pod: PodRef, what: str) -> None:
        """A pod has its devices, but something that its containers asked for is not passed on to them."""
        self.events.note("attach", str(pod), what, warning=True)

    def not_put_back(self, device: str, what: str) -> None:
        """A device is back, but the host does not take back something that it had there."""
        self.metrics.reconciled("restore-failed", "host-refused")
        self.events.note("detach", device, f"not put back: {what}", warning=True)


class GpuErrors:
    """Counts, logs and notes what the driver says of GPUs (XIDs), and passes it on to the book of health.

    Takes events in on any thread, and neither blocks nor raises.
    """

    def __init__(self, book: HealthHistory, registry: CollectorRegistry, events: Events) -> None:
        """`book` gets each event, and has the policy by which it counts."""
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
        kind = self._book.settings.value.gpu_policy.classify(event.xid)
        self._counter.labels(str(event.xid) if event.xid in XIDS else "other", kind.value).inc()
        subject = event.mig_uuid or event.gpu_uuid or "a GPU that the driver does not name"
        text = f"XID {event.xid} ({kind.value}): {XIDS.get(event.xid, UNKNOWN_XID)[1]}"
        is_serious = kind in XID_REASONS
        if self._is_news(subject, event):
            self._events.note("health", subject, text, warning=is_serious)
            log.log(logging.ERROR if is_serious else logging.INFO, "%s", text, extra={"device": subject})

    def _is_news(self, subject: str, event: GpuEvent) -> bool:
        """Return whether an error is worth a line: a failing program may cause hundreds a second, on all GPUs in turn.

        They would be the only recent events left.
        """
        last = self._logged.get((subject, event.xid))
        if last is not None and event.at < last + SAME_SECONDS:
            return False
        if len(self._logged) >= MOST_REMEMBERED:
            self._logged.clear()
        self._logged[subject, event.xid] = event.at
        return True
