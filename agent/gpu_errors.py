"""What the driver tells of GPUs (XIDs): counted, logged, and passed on to whoever judges health.

nodefabric_gpu_errors_total{xid, class}   XIDs by number; those that no table knows count as `other`
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from agent.events import Events
from agent.model.gpu_health import UNKNOWN_XID, XID_REASONS, XIDS, GpuEvent, GpuPolicy

log = logging.getLogger(__name__)


class GpuErrors:
    """Takes events in on any thread, and neither blocks nor raises."""

    def __init__(
        self,
        policy: Callable[[], GpuPolicy],
        registry: CollectorRegistry,
        events: Events,
        judge: Callable[[GpuEvent], None],
    ) -> None:
        """`judge` is told of each event; it must neither block nor raise."""
        self._policy = policy
        self._events = events
        self._judge = judge
        self._counter = Counter(
            "nodefabric_gpu_errors",
            "Errors that the NVIDIA driver told of (XIDs), by number and by what they mean here.",
            ("xid", "class"),
            registry=registry,
        )

    def take(self, event: GpuEvent) -> None:
        """Take an event in."""
        self._judge(event)
        kind = self._policy().classify(event.xid)
        self._counter.labels(str(event.xid) if event.xid in XIDS else "other", kind.value).inc()
        subject = event.mig_uuid or event.gpu_uuid or "a GPU that the driver does not name"
        text = f"XID {event.xid} ({kind.value}): {XIDS.get(event.xid, UNKNOWN_XID)[1]}"
        is_serious = kind in XID_REASONS
        self._events.note("health", subject, text, warning=is_serious)
        log.log(logging.ERROR if is_serious else logging.INFO, "%s", text, extra={"device": subject})
