"""All that the objects for schedulers are made of, and how kubelet's PodResources become part of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent.cluster.object_watch import WatchedPod
from agent.kubelet import podresources as kubelet
from agent.kubelet.kubelet_config import KubeletSettings
from agent.kubelet.podresources import DeviceAssignment, MemoryBlock
from agent.model.device import Snapshot
from agent.offer.offer import Unit

__all__ = ["Allocatable", "DeviceAssignment", "MemoryBlock", "NodeState", "PodUsage", "unlisted"]


@dataclass(frozen=True, slots=True)
class PodUsage:
    """What one pod holds, by PodResources."""

    namespace: str
    name: str
    units: frozenset[tuple[str, str]] = frozenset()
    """(resource name, device ID): other plugins' IDs need not differ from ours."""
    cpus_of: tuple[tuple[str, frozenset[int]], ...] = ()
    """(container, CPUs that it owns); the name is empty for CPUs that a pod's containers share."""
    memory: tuple[MemoryBlock, ...] = ()

    @classmethod
    def of(cls, pod: kubelet.PodDevices) -> PodUsage:
        """Take what kubelet told of a pod."""
        owned = [("", frozenset(pod.cpu_ids)), *((c.name, frozenset(c.cpu_ids)) for c in pod.containers)]
        return cls(
            namespace=pod.pod.namespace,
            name=pod.pod.name,
            units=frozenset((d.resource_name, i) for c in pod.containers for d in c.devices for i in d.device_ids),
            cpus_of=tuple(sorted((name, cpus) for name, cpus in owned if cpus)),
            memory=(*pod.memory, *(block for container in pod.containers for block in container.memory)),
        )

    @property
    def cpus(self) -> frozenset[int]:
        """All CPUs that the pod owns."""
        return frozenset[int]().union(*(cpus for _, cpus in self.cpus_of))


@dataclass(frozen=True, slots=True)
class Allocatable:
    """What kubelet hands out, by PodResources GetAllocatableResources.

    cpus are empty unless its CPU manager is static, memory unless its memory manager is Static.
    """

    cpus: frozenset[int] = frozenset()
    memory: tuple[MemoryBlock, ...] = ()
    devices: tuple[DeviceAssignment, ...] = ()

    @classmethod
    def of(cls, told: kubelet.Allocatable) -> Allocatable:
        """Take what kubelet told."""
        return cls(frozenset(told.cpu_ids), told.memory, told.devices)


@dataclass(frozen=True, slots=True)
class NodeState:
    """One moment of the node."""

    node_name: str
    snapshot: Snapshot
    units: Mapping[str, Sequence[Unit]]
    pods: tuple[PodUsage, ...] = ()
    allocatable: Allocatable = Allocatable()
    kubelet: KubeletSettings = field(default_factory=KubeletSettings)
    node_uid: str | None = None
    """UID of the Node object, which then owns ours."""
    watched: tuple[WatchedPod, ...] | None = None
    """The node's pods by the API server. None: not known, or not wanted."""


def unlisted(watched: Iterable[WatchedPod], pods: Iterable[kubelet.PodDevices]) -> tuple[WatchedPod, ...]:
    """List the running pods that ask for something of their own, and of which kubelet tells nothing."""
    known = {(pod.pod.namespace, pod.pod.name) for pod in pods}
    return tuple(
        pod
        for pod in watched
        if pod.phase == "Running" and (pod.extended or pod.exclusive_native) and (pod.namespace, pod.name) not in known
    )
