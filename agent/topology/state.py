"""kubelet's PodResources → the state that the topology object is made of. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agent.clients import kubelet
from agent.model.device import Snapshot
from agent.model.unit import OfferedUnit
from agent.topology.kubelet_config import KubeletSettings
from agent.topology.resource import Allocatable, MemoryBlock, NodeState, PodUsage


def node_state(
    node_name: str,
    node_uid: str | None,
    snapshot: Snapshot,
    units: Mapping[str, Sequence[OfferedUnit]],
    settings: KubeletSettings,
    pods: Iterable[kubelet.PodDevices],
    allocatable: kubelet.Allocatable,
) -> NodeState:
    """Join what is known of the node, its kubelet and its pods."""
    return NodeState(
        node_name=node_name,
        snapshot=snapshot,
        units=units,
        pods=tuple(_usage(pod) for pod in pods),
        allocatable=Allocatable(frozenset(allocatable.cpu_ids), _blocks(allocatable.memory)),
        kubelet=settings,
        node_uid=node_uid,
    )


def _usage(pod: kubelet.PodDevices) -> PodUsage:
    return PodUsage(
        namespace=pod.pod.namespace,
        name=pod.pod.name,
        unit_ids=frozenset(pod.all_device_ids),
        cpus=frozenset(cpu for container in pod.containers for cpu in container.cpu_ids),
        memory=_blocks(block for container in pod.containers for block in container.memory),
    )


def _blocks(blocks: Iterable[kubelet.MemoryBlock]) -> tuple[MemoryBlock, ...]:
    return tuple(MemoryBlock(block.memory_type, block.size, block.numa_nodes) for block in blocks)
