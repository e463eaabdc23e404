"""What this agent says on the Node object itself: labels, and the load of the ports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agent.cluster.apiserver import NODE
from agent.cluster.topology.labels import FabricNic, LabelFacts, fabric_nics, labels
from agent.cluster.topology.leaf_listener import LeafListener
from agent.cluster.topology.node_view import View
from agent.cluster.topology.publisher import Publication
from agent.errors import AgentError, Refused, Unavailable
from agent.model.counters import PortCount, PortRate, annotation, in_steps, loads, parse_annotation, rates

LABELS = ("device", "name", "port", "traffic")
TRAFFIC = "traffic is rdma (verbs), netdev (the network stack) or vf (of VFs, both)"
GAUGES: tuple[tuple[str, str, Callable[[PortRate], float | None]], ...] = (
    ("receive", f"Bandwidth into the port over the last sample; {TRAFFIC}.", lambda rate: rate.received),
    ("transmit", f"Bandwidth out of the port over the last sample; {TRAFFIC}.", lambda rate: rate.transmitted),
    ("speed", "What the line carries each way; missing while the link is down.", lambda rate: rate.count.speed),
)


class Bandwidth(Collector):
    """What is made of readings of the counters. A collector for the registry of the metrics."""

    def __init__(self, annotation_seconds: float) -> None:
        """The annotation shows the mean of so long."""
        self._annotation_seconds = annotation_seconds
        self._last: tuple[float, tuple[PortCount, ...]] | None = None
        self._period: tuple[float, tuple[PortCount, ...]] | None = None
        """Where the period began of which the annotation will show the mean."""
        self._rates: tuple[PortRate, ...] = ()
        self._before: Mapping[str, int] = {}
        """What the annotation said when this agent started."""
        self._loads: dict[str, int] | None = None
        """The load of each device in steps; None before the first period is over."""

    def sample(self, counts: tuple[PortCount, ...], now: float) -> bool:
        """Take a reading of the counters. Returns whether the annotation changes."""
        if self._last is not None:
            then, before = self._last
            self._rates = rates(before, counts, now - then)
        self._last = now, counts
        if self._period is None:
            self._period = now, counts
        elif now - self._period[0] >= self._annotation_seconds:
            then, before = self._period
            found = in_steps(loads(rates(before, counts, now - then)), self._loads or self._before)
            self._period = now, counts
            if found != self._loads:
                self._loads = found
                return True
        return False

    def annotation(self, present: str | None) -> str | None:
        """Return what the annotation says from now on; `present` is what it says now, if there is one.

        Until the first period of an agent's life is over, that stays.
        """
        if self._loads is None:
            self._before = parse_annotation(present or "")
            return present
        return annotation(self._loads)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """Report the bandwidth of the last sample."""
        for name, text, value in GAUGES:
            family = GaugeMetricFamily(f"nodefabric_port_{name}_bytes_per_second", text, labels=LABELS)
            for rate in self._rates:
                count, number = rate.count, value(rate)
                if number is not None:
                    family.add_metric((count.device, count.name, str(count.port), count.traffic), number)
            yield family


MAX_LINE = 256

log = logging.getLogger(__name__)


class NodeObject(Publication):
    """Labels and annotation on the Node, which is not ours alone.

    Also without labels or annotation of its own: what an earlier configuration put there is taken back.
    """

    kind = NODE
    is_shared = True

    def __init__(self, view: View, leaf: LeafListener, bandwidth: Bandwidth) -> None:
        self._view = view
        self._leaf = leaf
        self._bandwidth = bandwidth
        self._takes_back = True
        self._made: Mapping[str, str] = {}
        """The labels that were made last: newer than what is known of the Node, which is read seldom."""
        self._fabric: dict[str, FabricNic] = {}
        """The adapters to the fabric so far, by address."""

    async def content(self) -> Mapping[str, Any] | None:
        """Build the object; None if there is nothing to say, and nothing of ours on it to take back.

        Raises Unavailable as long as the Node could not be read: what is on it must be known to be kept.
        """
        config, node = self._view.config, self._view.own_node
        if not self._takes_back or node is None:
            return None
        present = await node.read()
        if present is None:
            if not config.writes_node:
                return None
            raise Unavailable(node.problem)
        metadata: dict[str, Any] = {"name": self._view.node.name, "labels": await self.labels(present.labels)}
        key = config.bandwidth.annotation
        load = self._bandwidth.annotation(present.annotations.get(key)) if key is not None else None
        if key is not None and load is not None:
            metadata["annotations"] = {key: load}
        metadata = {name: value for name, value in metadata.items() if value}
        if len(metadata) == 1 and not present.labels and not present.annotations:
            return None
        return {"apiVersion": NODE.api_version, "kind": NODE.kind, "metadata": metadata}

    def yields(self, error: AgentError) -> bool:
        """Leave on the Node what is wanted no more where the right to write it went with what was wanted."""
        if isinstance(error, Refused) and error.status == HTTPStatus.FORBIDDEN and not self._view.config.writes_node:
            self._takes_back = False
            log.warning("what an earlier configuration put on the Node stays there: %s", error)
            return True
        return False

    async def labels(self, kept: Mapping[str, str]) -> dict[str, str]:
        """Make the labels; `kept` are the present ones, for facts that are not known now."""
        config, snapshot, host_names = self._view.config, self._view.node.snapshot.value, self._view.host_names()
        named = config.lldp_netdevs
        rails = self._view.node.offer.value.rail_keys
        nics = fabric_nics(snapshot, named, host_names, self._fabric, rails)
        for nic in nics:
            names = [netdev.name for netdev in nic.netdevs if netdev.name in named] or [host_names.get(nic.address, "")]
            if nic.netdevs if named else nic.rdma_devices:
                self._fabric[nic.address] = FabricNic(nic.driver, names[0])
        known = LabelFacts(self._view.node.name, snapshot, nics, self._leaf.at, self._first_line, rails)
        self._made = await asyncio.to_thread(labels, config.labels.keys, known, {**kept, **self._made})
        return dict(self._made)

    def _first_line(self, path: Path) -> str | None:
        try:
            with (self._view.node.host.root / path.relative_to("/")).open("rb") as file:
                return file.readline(MAX_LINE).decode("utf-8", "replace").strip() or None
        except OSError as error:
            log.debug("no label from %s: %s", path, error.strerror)
            return None
