"""What the driver tells of GPUs (XIDs): counted, logged, and passed on to the book of health.

nodefabric_gpu_errors_total{xid, class}   XIDs by number; those that no table knows count as `other`
"""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter

from agent.events import Events
from agent.health import HealthBook
from agent.model.gpu_health import UNKNOWN_XID, XID_REASONS, XIDS, GpuEvent

SAME_SECONDS = 60.0
"""The same error of a GPU is logged and noted once in so long; all are counted."""
MOST_REMEMBERED = 1000

log = logging.getLogger(__name__)


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
            "Errors that the NVIDIA driver told of (XIDs), by number and by what they mean here.",
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
