"""Live bandwidth of the node's ports: gauges for each scrape, and a slow, coarse load for schedulers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agent.model.counters import PortCount, PortRate, annotation, in_steps, loads, parse_annotation, rates

LABELS = ("device", "name", "port", "traffic")
TRAFFIC = "traffic is rdma (verbs), netdev (the network stack) or vf (of VFs, both)"


class Bandwidth(Collector):
    """What is made of readings of the counters. A collector for the registry of the metrics."""

    def __init__(self, annotation_seconds: float) -> None:
        """The annotation tells the mean of so long."""
        self._annotation_seconds = annotation_seconds
        self._last: tuple[float, tuple[PortCount, ...]] | None = None
        self._period: tuple[float, tuple[PortCount, ...]] | None = None
        """Where the period began of which the annotation tells the mean."""
        self._rates: tuple[PortRate, ...] = ()
        self._before: Mapping[str, int] = {}
        """What the annotation said when this agent started."""
        self._told: dict[str, int] | None = None
        """The load of each device in steps; None before the first period is over."""

    def sample(self, counts: tuple[PortCount, ...], now: float) -> bool:
        """Take a reading of the counters. Tells whether the annotation says something else from now on."""
        if self._last is not None:
            then, before = self._last
            self._rates = rates(before, counts, now - then)
        self._last = now, counts
        if self._period is None:
            self._period = now, counts
        elif now - self._period[0] >= self._annotation_seconds:
            then, before = self._period
            found = in_steps(loads(rates(before, counts, now - then)), self._told or self._before)
            self._period = now, counts
            if found != self._told:
                self._told = found
                return True
        return False

    def annotation(self, present: str | None) -> str | None:
        """Return what the annotation says from now on; `present` is what it says now, if there is one.

        Until the first period of an agent's life is over, that stays.
        """
        if self._told is None:
            self._before = parse_annotation(present or "")
            return present
        return annotation(self._told)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """Tell the bandwidth of the last sample."""
        received = GaugeMetricFamily(
            "nodefabric_port_receive_bytes_per_second",
            f"Bandwidth into the port over the last sample; {TRAFFIC}.",
            labels=LABELS,
        )
        transmitted = GaugeMetricFamily(
            "nodefabric_port_transmit_bytes_per_second",
            f"Bandwidth out of the port over the last sample; {TRAFFIC}.",
            labels=LABELS,
        )
        speed = GaugeMetricFamily(
            "nodefabric_port_speed_bytes_per_second",
            "What the line carries each way; not told while the link is down.",
            labels=LABELS,
        )
        for rate in self._rates:
            count = rate.count
            labels = (count.device, count.name, str(count.port), count.traffic)
            received.add_metric(labels, rate.received)
            transmitted.add_metric(labels, rate.transmitted)
            if count.speed is not None:
                speed.add_metric(labels, count.speed)
        yield from (received, transmitted, speed)
