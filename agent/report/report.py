"""Where the parts leave word of what they do and find: for metrics, the recent events, /readyz, and health."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from agent.errors import AgentError, ClaimConflict, DeviceBusy
from agent.health import HealthBook
from agent.model.allocation import ClaimRef, PodRef
from agent.process.conditions import Conditions
from agent.report.events import Events
from agent.report.facts import DriverState
from agent.report.metrics import Metrics
from agent.state import Latest
from cni.call import Observer


@dataclass(frozen=True)
class Report(Observer):
    """The agent's accounts. Any thread may tell them something."""

    metrics: Metrics
    conditions: Conditions
    events: Events
    health: HealthBook
    """What is remembered of the devices' health, and whether anything may be offered at all."""
    driver: Latest[DriverState | None] = field(default_factory=partial(Latest[DriverState | None], None))
    """Of claims; None while it does not run."""

    def claim_failed(self, ref: ClaimRef, what: str, error: AgentError) -> None:
        """Count a claim's device that was in other hands to the end, and note any failure, the same again once."""
        cause = error.__cause__ if isinstance(error, DeviceBusy) else error
        if isinstance(cause, ClaimConflict):
            self.metrics.claim_conflict("pod" if cause.holder.startswith(("pod ", "a pod ")) else "claim")
        self.events.claim_failed(ref, f"{what}: {error}")

    def reconciled(self, action: str, reason: str) -> None:
        """Count what was brought into accord, and note it among the recent events."""
        self.metrics.reconciled(action, reason)
        self.events.reconciled(action, reason)

    def added(self, seconds: Mapping[str, float]) -> None:
        """An ADD has succeeded, and its steps took so long."""
        self.metrics.observe_steps(seconds)

    def not_told(self, pod: PodRef, what: str) -> None:
        """A pod has its devices, but something that its containers asked for is not told to them."""
        self.events.note("attach", str(pod), what, warning=True)

    def not_put_back(self, device: str, what: str) -> None:
        """A device is back, but the host does not take back something that it had there."""
        self.metrics.reconciled("restore-failed", "host-refused")
        self.events.note("detach", device, f"not put back: {what}", warning=True)
