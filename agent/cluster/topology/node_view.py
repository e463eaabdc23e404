"""What everything that is published is made of: one view of the node, its kubelet and its pods."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.cluster.apiserver import FIELD_MANAGER, NODE, ApiServer, on_own_thread
from agent.cluster.object_watch import ObjectWatch, WatchedPod, pods_of
from agent.cluster.topology.publisher import Problems, owned_keys
from agent.config.topology import Topology
from agent.errors import Unavailable
from agent.hardware.host import Host
from agent.hardware.lldp import Neighbour
from agent.hardware.sysfs.counters import read_port_counts, sums, with_busy_vfs
from agent.kubelet.kubelet_config import KubeletConfigFile, KubeletSettings
from agent.kubelet.podresources import Allocatable, PodDevices, PodResources
from agent.ledger import Ledger
from agent.model.counters import PortCount, VfCounters
from agent.model.device import Snapshot
from agent.offer.offer import Offer, Unit
from agent.state import Latest


def cpus_of(pod: PodDevices) -> list[tuple[str, frozenset[int]]]:
    """List each container's own CPUs; the name is empty for those that a pod's containers share."""
    owned = [("", pod.cpu_ids), *((c.name, c.cpu_ids) for c in pod.containers)]
    return sorted((name, frozenset(cpus)) for name, cpus in owned if cpus)


@dataclass(frozen=True, slots=True)
class NodeState:
    """One moment of the node."""

    node_name: str
    snapshot: Snapshot
    units: Mapping[str, Sequence[Unit]]
    pods: tuple[PodDevices, ...] = ()
    allocatable: Allocatable = field(default_factory=Allocatable)
    """What kubelet hands out. CPUs only if its CPU manager is static, memory only if its memory manager is Static."""
    kubelet: KubeletSettings = field(default_factory=KubeletSettings)
    node_uid: str | None = None
    """UID of the Node object, which then owns ours."""
    watched: tuple[WatchedPod, ...] | None = None
    """The node's pods by the API server. None: not known, or not wanted."""

    @property
    def owned_cpus(self) -> frozenset[int]:
        """All CPUs that some pod owns."""
        return frozenset(cpu for pod in self.pods for _, cpus in cpus_of(pod) for cpu in cpus)


def unlisted(watched: Iterable[WatchedPod], pods: Iterable[PodDevices]) -> tuple[WatchedPod, ...]:
    """List the running pods that ask for something of their own, and that kubelet does not list."""
    known = {pod.pod.names for pod in pods}
    return tuple(
        pod
        for pod in watched
        if pod.phase == "Running" and (pod.extended or pod.exclusive_native) and (pod.namespace, pod.name) not in known
    )


FORGETFUL_SECONDS = 60.0
"""How long kubelet may list fewer pods than run: for a moment after its start it knows the static ones alone."""
RETRY_SECONDS = 30.0
"""Between attempts to read the Node."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Node:
    """Where what is published of a node comes from. An offer of no snapshot is none: it comes later."""

    name: str
    host: Host
    snapshot: Latest[Snapshot]
    offer: Latest[Offer]
    kubelet: PodResources
    ledger: Ledger
    leaves: Latest[Mapping[str, Neighbour]]
    """Adapter → the switch port at the end of its link, as far as anybody has listened."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """What nobody configures about time. In seconds."""

    coalesce: float = 2.0
    """Changes within this time make one write."""
    shared: float = 0.5
    """Objects that are built within so short a time are made of one state: pods by the API server, then by kubelet."""
    sample: float = 15.0
    """Between readings of the ports' counters."""
    annotation: float = 600.0
    """The annotation shows the mean of so long, and is written at most once in so long."""
    rest: float = 1.0
    """After LLDP frames were heard nobody listens for so long; meanwhile they wait in the kernel, or are dropped."""
    clock: Callable[[], float] = time.monotonic


DEFAULT_INTERVALS = Intervals()


@dataclass(frozen=True, slots=True)
class NodeMetadata:
    """What is read of the Node object."""

    uid: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """Those that this agent has applied."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Likewise."""


class View:
    """The node as the publications of one configuration see it. `api` is None if nothing goes to the API server."""

    def __init__(
        self,
        config: Topology,
        node: Node,
        api: ApiServer | None,
        problems: Problems,
        intervals: Intervals = DEFAULT_INTERVALS,
    ) -> None:
        self.config = config
        self.node = node
        self.problems = problems
        self.intervals = intervals
        self.clock = clock = intervals.clock
        self.usage = Latest(object())
        """Replaced when units or pods may have changed."""
        self.facts = Latest(object())
        """Replaced when what labels and annotation are made of may have changed."""
        self.own_node = OwnNode(api, node.name, config.heartbeat_seconds, clock) if api is not None else None
        self._watch: ObjectWatch[WatchedPod] | None = None
        if api is not None and config.watches_pods:
            self._watch = ObjectWatch(api, pods_of(node.name), self.usage_changed)
        self._is_watching = False
        self._kubelet_config = KubeletConfigFile(config.kubelet_config, config.kubelet_config_dir)
        self._guard = asyncio.Lock()
        self._state: NodeState | None = None
        self._state_at = 0.0
        self._forgetful_since: float | None = None

    def usage_changed(self) -> None:
        """Say that units or pods may have changed. Any thread may."""
        self.usage.set(object())

    def facts_changed(self) -> None:
        """Say that what labels and annotation are made of may have changed. Any thread may."""
        self.facts.set(object())

    # ------------------------------------------------------------------ pods

    @property
    def watched(self) -> tuple[WatchedPod, ...] | None:
        """The pods of the node by the API server; None if they are not known, or not watched."""
        return self._watch.objects if self._watch is not None else None

    def watch_pods(self) -> None:
        """Follow the pods by the API server, if they are wanted and not followed yet."""
        if self._watch is not None and not self._is_watching:
            self._is_watching = True
            self._watch.start()

    def stop(self) -> None:
        """End the watch of pods."""
        if self._watch is not None:
            self._watch.stop()

    async def state(self) -> NodeState | None:
        """Ask kubelet what its pods hold. None as long as nothing is known of the units, or of the pods that count.

        Also while kubelet itself does not know all pods yet that run. Raises Unavailable.

        The pods by the API server are taken first: of a pod that counts, kubelet then knows what it holds.
        """
        async with self._guard:
            now = self.clock()
            if self._state is not None and now - self._state_at < self.intervals.shared:
                return self._state
            taken_at, watched, offer = self.node.kubelet.clock(), self.watched, self.node.offer.value
            if not offer.snapshot.generation:
                return None  # a node without devices is something else
            if self._watch is not None:
                self.problems.note("pods", _effect(self._watch))
                if watched is None and self._watch.problem is None:
                    return None  # it says `usage_changed` once the pods are listed
            metadata = await self._own_metadata()
            settings = await asyncio.to_thread(self._kubelet_config.read)
            self.problems.note("kubelet's configuration", settings.problem)
            listed = await self.node.kubelet.listing(taken_at)
            if self._is_forgetful(unlisted(watched or (), listed.pods), now):
                return None  # or what pods hold would be published as free
            self._state = NodeState(
                node_name=self.node.name,
                node_uid=metadata.uid if metadata is not None else None,
                snapshot=self.node.snapshot.value,
                units=offer.units,
                kubelet=settings,
                pods=listed.pods,
                allocatable=await self.node.kubelet.allocatable(),
                watched=watched,
            )
            self._state_at = now
            return self._state

    def _is_forgetful(self, missing: Sequence[WatchedPod], now: float) -> bool:
        """Whether kubelet does not know yet of pods that run."""
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
        if self.own_node is None:
            return None
        found = await self.own_node.read()
        owner = f"what is published has no owner: {self.own_node.problem}" if found is None else None
        self.problems.note("owner", owner)
        return found

    # -------------------------------------------------------------- hardware

    def host_names(self) -> dict[str, str]:
        """Return the host's names of interfaces that are in pods, by PCI address."""
        return {row.device: row.undo.netdev for row in self.node.ledger.attachments()}

    def port_counts(self) -> tuple[PortCount, ...]:
        """Read what ports, and the VFs of those with one in a pod, have passed. Blocks for a moment."""
        snapshot = self.node.snapshot.value
        return read_port_counts(self.node.host.root, snapshot, sums(self._vf_counters(snapshot), snapshot))

    def _vf_counters(self, snapshot: Snapshot) -> tuple[VfCounters, ...]:
        ledger = self.node.ledger
        held = {device for hold in ledger.holds() for device in hold.devices} | {
            row.device for row in ledger.attachments()
        }
        busy = with_busy_vfs(snapshot, held)
        return self.node.host.counters(busy, frozenset()).vfs if busy.devices else ()


def _effect(watch: ObjectWatch[WatchedPod]) -> str | None:
    """Say what it does to the fingerprint that pods cannot be listed."""
    if watch.problem is None or watch.objects is not None:
        return watch.problem
    return (
        f"{watch.problem}: the fingerprint counts the pods that kubelet lists, and with pods that have ended and are"
        " not deleted NodeResourceTopologyMatch rejects this node's object. Allow the agent to list and watch pods, or"
        " set topology.fingerprint.pods: podresources"
    )


class OwnNode:
    """Reads the own Node object's metadata when asked, at most once in `max_age` seconds.

    It is read again when older than a heartbeat, for a node that was taken out of the cluster and came back has
    another UID.
    """

    def __init__(self, api: ApiServer, name: str, max_age: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._name = name
        self._max_age = max_age
        self._clock = clock
        self._found: NodeMetadata | None = None
        self._due: float | None = None
        self._reading = asyncio.Lock()
        self.problem = "the Node object has not been read yet"
        """Why it could not be read when it was last tried; empty if it could."""

    async def read(self) -> NodeMetadata | None:
        """Return what is known of the Node; None before the API server has answered."""
        async with self._reading:  # who asks meanwhile has the same answer
            now = self._clock()
            if self._due is None or now >= self._due:
                self._due = now + RETRY_SECONDS
                try:
                    self._found = _parse(await on_own_thread(self._api.metadata, NODE, self._name))
                    self._due = now + self._max_age
                    self.problem = ""
                except Unavailable as error:
                    self.problem = str(error)
                    log.debug("the Node object could not be read: %s", error)
            return self._found


def _parse(metadata: Mapping[str, Any]) -> NodeMetadata:
    mine = {}
    for section in ("labels", "annotations"):
        keys = owned_keys(metadata, section, FIELD_MANAGER)
        mine[section] = {key: text for key, text in metadata.get(section, {}).items() if key in keys}
    return NodeMetadata(metadata["uid"], mine["labels"], mine["annotations"])
