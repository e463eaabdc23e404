"""All that this node publishes for the cluster's schedulers: which objects, and what keeps each of them in step.

`Publications` has the one list of them. What is published of another scheduler is a module with a `Publication`, and
a line there. Nothing else in the agent waits for any of this.
"""

from __future__ import annotations

import asyncio

from agent.cluster.apiserver import ApiServer
from agent.cluster.topology.leaf_listener import LeafListener
from agent.cluster.topology.node_object import Bandwidth, NodeObject
from agent.cluster.topology.node_view import DEFAULT_INTERVALS, Intervals, Node, View
from agent.cluster.topology.noderesourcetopology import NodeResourceTopology
from agent.cluster.topology.numatopology import Numatopology
from agent.cluster.topology.publisher import FACTS_SECONDS, REFRESH_SECONDS, Problems, Publication, Publisher, Times
from agent.config import Config, Topology
from agent.process.conditions import Conditions
from agent.report.metrics import Metrics
from agent.state import Latest, first

LISTEN_SECONDS = 60.0
"""How long an adapter that was away for a moment may go unheard."""


class Publications:
    """Everything that one configuration publishes. `run` until cancelled; `changed` may be called from any thread."""

    def __init__(
        self,
        config: Topology,
        node: Node,
        api: ApiServer | None,
        metrics: Metrics,
        conditions: Conditions,
        intervals: Intervals = DEFAULT_INTERVALS,
    ) -> None:
        """`api` is None if nothing is to go to the API server. `conditions` show what is wrong."""
        self._config = config
        self._problems = Problems(conditions)
        self.view = view = View(config, node, api, self._problems, intervals)
        self._registry = metrics.registry
        self._bandwidth = Bandwidth(intervals.annotation)
        self._leaf = LeafListener(view)
        objects: list[Publication] = []
        if config.publish:
            objects.append(NodeResourceTopology(view))
        if config.volcano:
            objects.append(Numatopology(view))
        objects.append(NodeObject(view, self._leaf, self._bandwidth))
        self._publishers = [self._publisher(one, api, metrics) for one in objects] if api is not None else []

    def _publisher(self, publication: Publication, api: ApiServer, metrics: Metrics) -> Publisher:
        times = Times(
            coalesce=self.view.intervals.coalesce,
            heartbeat=self._config.heartbeat_seconds,
            start_spread=self._config.start_spread_seconds,
            settle=self._config.settle_seconds if publication.settles else 0.0,
            refresh=FACTS_SECONDS if publication.is_shared else REFRESH_SECONDS,
        )
        publisher = Publisher(publication, api, metrics, times, self._problems)
        (self.view.facts if publication.is_shared else self.view.usage).subscribe(publisher.changed)
        return publisher

    def changed(self) -> None:
        """Say that units or pods may have changed."""
        self.view.usage_changed()

    async def run(self) -> None:
        """Publish until cancelled."""
        self._registry.register(self._bandwidth)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_hardware(), name="publications' inventory")
                for publisher in self._publishers:
                    tasks.create_task(publisher.run(), name="publisher")
                tasks.create_task(self._sample(), name="bandwidth")
                self.view.watch_pods()
        finally:
            self.view.stop()
            self._leaf.close()
            self._registry.unregister(self._bandwidth)
            self._problems.forget()

    async def step(self, now: float) -> float:
        """Do what is due at the API server at this moment, and return when something is due next.

        Instead of `run`, for tests and benchmarks, which pass the time themselves.
        """
        self.view.watch_pods()
        return min([await publisher.step(now) for publisher in self._publishers])

    async def _sample(self) -> None:
        while True:
            counts = await asyncio.to_thread(self.view.port_counts)
            if self._bandwidth.sample(counts, self.view.clock()):
                self.view.facts_changed()
            await asyncio.sleep(self.view.intervals.sample)

    async def _follow_hardware(self) -> None:
        """Follow each snapshot. An adapter that went and came back between two is listened on again, too."""
        snapshot = None
        while True:
            if self._config.labels.need_lldp:
                self._leaf.follow(self.view.node.snapshot.value)
            if self.view.node.snapshot.value is not snapshot:
                snapshot = self.view.node.snapshot.value
                self.view.usage_changed()
                self.view.facts_changed()
            await first(self.view.node.snapshot.other_than(snapshot), seconds=LISTEN_SECONDS)


class Republication:
    """Publishes as the configuration of the moment says: another one ends the publications, and others begin."""

    def __init__(
        self, config: Latest[Config], node: Node, api: ApiServer | None, metrics: Metrics, conditions: Conditions
    ) -> None:
        """What one configuration put into objects is taken back by the next."""
        self._config = config
        self._node = node
        self._api = api
        self._metrics = metrics
        self._conditions = conditions
        self._current: Publications | None = None

    def make(self, topology: Topology) -> Publications:
        """Make the publications of a configuration, which are not run yet."""
        return Publications(topology, self._node, self._api, self._metrics, self._conditions)

    def changed(self) -> None:
        """Say that units or pods may have changed."""
        if self._current is not None:
            self._current.changed()

    async def run(self) -> None:
        """Publish until cancelled. An error that nobody expected ends it; it may be run again."""
        while True:
            config = self._config.value
            topology = config.topology
            self._current = self.make(topology)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(self._current.run(), name="publications")
                while config.topology == topology:
                    config = await self._config.other_than(config)
                running.cancel()
