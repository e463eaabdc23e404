"""All that this node tells the cluster's schedulers: which objects, made of what, kept by whom.

Wires the publishers to the inventory, the units, kubelet's PodResources and, where the fingerprint needs the phases of
pods, one watch of this node's pods. Nothing else in the agent waits for any of this.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from agent.bandwidth import Bandwidth
from agent.clients.apiserver import NODE, NUMATOPOLOGY, TOPOLOGY
from agent.clients.kubelet import Allocatable, PodDevices
from agent.clients.kubelet_config import KubeletConfigFile
from agent.clients.pod_watch import PodLister, PodWatch, WatchedPod
from agent.config.topology import Topology
from agent.errors import AgentError, HardwareError, Refused
from agent.hardware.port_counters import read_port_counts, sums
from agent.hardware.sysfs_cpu import read_cpu_places
from agent.metrics import Metrics
from agent.model.bandwidth import PortCount
from agent.model.counters import VfCounters
from agent.model.cpu import CpuPlace
from agent.model.device import Snapshot
from agent.model.unit import OfferedUnit
from agent.node_events import EventApi
from agent.topology import numatopology, resource
from agent.topology.labels import NO_NAMES
from agent.topology.leaf import LeafListener
from agent.topology.nfd import FeatureFile
from agent.topology.node_object import NodeObject
from agent.topology.own_node import MetadataApi, NodeMetadata, OwnNode
from agent.topology.publisher import ObjectApi, Pace, Publication, Publisher
from agent.topology.state import NodeState, node_state, unlisted

SHARED_STATE_SECONDS = 0.5
"""Objects that are built within so short a time are made of one answer of kubelet."""
FACTS_SECONDS = 60.0
"""What labels are made of is looked at this often, even if nothing told of a change: a file, a GPU's fabric."""

FORGETFUL_SECONDS = 60.0
"""How long kubelet may list fewer pods than run: for a moment after its start it knows the static ones alone."""
LISTEN_SECONDS = 60.0
"""How long an adapter that was away for a moment may go unheard."""

log = logging.getLogger(__name__)


class ClusterApi(ObjectApi, MetadataApi, PodLister, EventApi, Protocol):
    """The API server, as all of this needs it."""


class Hardware(Protocol):
    """The inventory, as all of this needs it."""

    @property
    def snapshot(self) -> Snapshot: ...

    async def newer_than(self, generation: int) -> Snapshot: ...


class Kubelet(Protocol):
    """kubelet's PodResources, as all of this needs them. Both raise Unavailable."""

    async def list(self) -> tuple[PodDevices, ...]: ...

    async def allocatable(self) -> Allocatable: ...


class Publications:
    """Everything that is published. `run` runs until cancelled; `changed` may be called from any thread."""

    def __init__(
        self,
        config: Topology,
        node_name: str,
        root: Path,
        inventory: Hardware,
        kubelet: Kubelet,
        units: Callable[[], Mapping[str, Sequence[OfferedUnit]] | None],
        metrics: Metrics,
        api: ClusterApi | None,
        complain: Callable[[str | None], None],
        clock: Callable[[], float] = time.monotonic,
        host_names: Callable[[], Mapping[str, str]] = lambda: NO_NAMES,
        vf_counters: Callable[[Snapshot], tuple[VfCounters, ...]] = lambda snapshot: (),
    ) -> None:
        """`units` are None until it is known what is offered; `api` is None if nothing is to go to the API server.

        `complain` is told what is wrong, and None when nothing is. `host_names` tells what the interfaces of
        adapters in pods are called in the host, `vf_counters` what PFs count of their VFs, of each PF with one in a
        pod; it may take a moment.
        """
        self._config = config
        self._node_name = node_name
        self._root = root
        self._inventory = inventory
        self._kubelet = kubelet
        self._units = units
        self._complain = complain
        self._clock = clock
        self._kubelet_config = KubeletConfigFile(config.kubelet_config, config.kubelet_config_dir)
        self._places: tuple[frozenset[int], Mapping[int, CpuPlace]] = frozenset(), {}
        self._with_pods = True
        self._takes_back = True
        self._problems: dict[str, str] = {}
        self._state_lock = asyncio.Lock()
        self._state_at = 0.0
        self._known_state: NodeState | None = None
        self._forgetful_since: float | None = None
        self._features = FeatureFile(root / config.labels.nfd_file.relative_to("/"))
        self._features_changed = asyncio.Event()
        self._node = OwnNode(api, node_name, config.heartbeat_seconds, clock) if api is not None else None
        self._watch = PodWatch(api, node_name, self.changed) if api is not None and config.watches_pods else None
        self._is_watching = False
        self._vf_counters = vf_counters
        self._bandwidth = Bandwidth(
            self._port_counts,
            sample_seconds=config.bandwidth.sample_seconds,
            annotation_seconds=config.bandwidth.annotation_seconds,
            changed=self._facts_changed,
            clock=clock,
        )
        self._registry = metrics.registry
        self._leaf = LeafListener(
            config.lldp_netdevs, self._facts_changed, lambda what: self._note("LLDP", what), clock
        )
        self._node_object = NodeObject(
            config, node_name, root, lambda: inventory.snapshot, self._leaf.at, self._bandwidth.annotation, host_names
        )
        self._publishers = tuple(self._make(api, metrics)) if api is not None else ()

    def changed(self) -> None:
        """Say that units or pods may have changed."""
        for publisher in self._publishers:
            if publisher.kind is not NODE:
                publisher.changed()

    def _facts_changed(self) -> None:
        """Say that what labels and annotation are made of may have changed. Loop's thread."""
        for publisher in self._publishers:
            if publisher.kind is NODE:
                publisher.changed()
        self._features_changed.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        samples = self._config.bandwidth.sample_seconds > 0
        if samples:
            self._registry.register(self._bandwidth)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_hardware(), name="publications' inventory")
                for publisher in self._publishers:
                    tasks.create_task(publisher.run(), name="publisher")
                if samples:
                    tasks.create_task(self._bandwidth.run(), name="bandwidth")
                tasks.create_task(self._keep_features(), name="features")
                self._watch_pods()
        finally:
            self.stop()
            self._leaf.close()
            if samples:
                self._registry.unregister(self._bandwidth)
            self._complain(None)

    async def step(self, now: float) -> float:
        """Do what is due at the API server at this moment, and return when something is due next.

        Instead of `run`, for whoever passes the time himself.
        """
        self._watch_pods()
        return min([await publisher.step(now) for publisher in self._publishers])

    @property
    def watched(self) -> tuple[WatchedPod, ...] | None:
        """The pods of the node by the API server; None if they are not known, or not watched."""
        return self._watch.pods if self._watch is not None else None

    def stop(self) -> None:
        """End the watch of pods, as the end of `run` does."""
        if self._watch is not None:
            self._watch.stop()

    def _watch_pods(self) -> None:
        if self._watch is not None and not self._is_watching:
            self._is_watching = True
            self._watch.start()

    def _make(self, api: ClusterApi, metrics: Metrics) -> list[Publisher]:
        config = self._config
        pace = Pace(
            coalesce=config.coalesce_seconds,
            heartbeat=config.heartbeat_seconds,
            start_spread=config.start_spread_seconds,
        )
        wanted = []
        if config.publish:
            wanted.append(Publication(TOPOLOGY, self._topology))
        if config.volcano:
            wanted.append(Publication(NUMATOPOLOGY, self._numatopology, yields=self._goes_without_pods))
        # Also without labels or annotation of its own: what an earlier configuration put there is taken back.
        wanted.append(Publication(NODE, self._own_node, takes_over=False, yields=self._leaves_node, is_local=False))

        def publisher(publication: Publication) -> Publisher:
            kind = publication.kind.kind
            its_pace = replace(pace, refresh=FACTS_SECONDS) if publication.kind is NODE else pace
            return Publisher(
                publication, api, metrics, its_pace, complain=lambda what: self._note(kind, what), clock=self._clock
            )

        return [publisher(publication) for publication in wanted]

    # ------------------------------------------------------------------ objects

    async def _topology(self) -> Mapping[str, Any] | None:
        state = await self._state()
        return (
            None
            if state is None
            else resource.build(state, self._config.fingerprint.pods, self._config.fingerprint.method)
        )

    async def _numatopology(self) -> Mapping[str, Any] | None:
        state = await self._state()
        if state is None:
            return None
        cpus = frozenset(cpu for node in state.snapshot.numa_nodes for cpu in node.cpus)
        if cpus != self._places[0]:
            self._places = cpus, await asyncio.to_thread(read_cpu_places, self._root, cpus)
        return numatopology.build(state, self._places[1], with_pods=self._with_pods)

    def _goes_without_pods(self, error: AgentError) -> bool:
        """Leave podAllocations out where the cluster's definition of the object has none (Volcano before 1.16)."""
        if self._with_pods and "podAllocations" in str(error):
            self._with_pods = False
            log.warning("the cluster's Numatopology has no podAllocations: publishing it without")
            return True
        return False

    def _leaves_node(self, error: AgentError) -> bool:
        """Leave on the Node what is wanted no more where the right to write it went with what was wanted."""
        if isinstance(error, Refused) and error.status == HTTPStatus.FORBIDDEN and not self._config.writes_node:
            self._takes_back = False
            log.warning("what an earlier configuration put on the Node stays there: %s", error)
            return True
        return False

    async def _own_node(self) -> Mapping[str, Any] | None:
        if not self._takes_back:
            return None
        assert self._node is not None
        return await self._node_object.build(self._node)

    async def _state(self) -> NodeState | None:
        """Ask kubelet what its pods hold. None as long as nothing is known of the units, or of the pods that count.

        Also while kubelet itself does not know all pods yet that run. Raises Unavailable.

        The pods by the API server are taken first: of a pod that counts, kubelet then knows what it holds.
        """
        async with self._state_lock:
            now = self._clock()
            fresh = min(SHARED_STATE_SECONDS, self._config.coalesce_seconds / 2)
            if self._known_state is not None and now - self._state_at < fresh:
                return self._known_state
            watched, units = self.watched, self._units()
            if units is None:
                return None  # a node without devices is something else
            if self._watch is not None:
                self._note("pods", self._watch.problem)
                if watched is None and self._watch.problem is None:
                    return None  # it calls `changed` once the pods are listed
            node = await self._own_metadata()
            settings = await asyncio.to_thread(self._kubelet_config.read)
            self._note("kubelet's configuration", settings.problem)
            pods = await self._kubelet.list()
            if self._is_forgetful(unlisted(watched or (), pods), now):
                return None  # or what pods hold would be told as free
            allocatable = await self._kubelet.allocatable()
            self._known_state = node_state(
                self._node_name,
                node.uid if node is not None else None,
                self._inventory.snapshot,
                units,
                settings,
                pods,
                allocatable,
                watched,
            )
            self._state_at = now
            return self._known_state

    def _is_forgetful(self, missing: Sequence[WatchedPod], now: float) -> bool:
        """Tell whether kubelet has still to hear of pods that run."""
        if not missing:
            self._forgetful_since = None
            return False
        if self._forgetful_since is None:
            self._forgetful_since = now
            log.info(
                "kubelet does not list %s/%s, which runs: it may have just started",
                missing[0].namespace,
                missing[0].name,
            )
        return now - self._forgetful_since < FORGETFUL_SECONDS

    async def _own_metadata(self) -> NodeMetadata | None:
        """Read the Node that owns what is published. Nobody else would miss it: the name may be another node's."""
        if self._node is None:
            return None
        found = await self._node.read()
        self._note("owner", f"what is published has no owner: {self._node.problem}" if found is None else None)
        return found

    # ------------------------------------------------------------- hardware

    def _port_counts(self) -> tuple[PortCount, ...]:
        snapshot = self._inventory.snapshot
        return read_port_counts(self._root, snapshot, sums(self._vf_counters(snapshot), snapshot))

    async def _follow_hardware(self) -> None:
        generation = self._inventory.snapshot.generation
        while True:
            if self._config.labels.need_lldp:
                self._leaf.follow(self._inventory.snapshot)
            self.changed()
            self._facts_changed()
            generation = await self._another(generation)

    async def _another(self, generation: int) -> int:
        """Wait for a snapshot that is newer. An adapter that went and came back meanwhile is listened on anew."""
        while True:
            try:
                async with asyncio.timeout(LISTEN_SECONDS):
                    return (await self._inventory.newer_than(generation)).generation
            except TimeoutError:
                if self._config.labels.need_lldp:
                    self._leaf.follow(self._inventory.snapshot)

    async def _keep_features(self) -> None:
        """Keep the file for node-feature-discovery in step; take back what an earlier configuration put there."""
        if self._config.labels.to != "nfd":
            await self._tell_features(self._features.withdraw)
            return
        while True:
            self._features_changed.clear()
            kept = await asyncio.to_thread(self._features.read)
            found = await self._node_object.labels(kept)
            await self._tell_features(partial(self._features.write, found))
            await asyncio.sleep(self._config.coalesce_seconds)
            try:
                async with asyncio.timeout(FACTS_SECONDS):
                    await self._features_changed.wait()
            except TimeoutError:
                continue

    async def _tell_features(self, work: Callable[[], object]) -> None:
        try:
            await asyncio.to_thread(work)
        except HardwareError as error:
            self._note("features", str(error))
        else:
            self._note("features", None)

    def _note(self, subject: str, problem: str | None) -> None:
        before = dict(self._problems)
        if problem is None:
            self._problems.pop(subject, None)
        else:
            self._problems[subject] = problem
        if before != self._problems:
            self._complain("; ".join(text for _, text in sorted(self._problems.items())) or None)
