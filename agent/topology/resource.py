"""The NodeResourceTopology object (topology.node.k8s.io/v1alpha2) of this node.

Pure. The object says what the scheduler plugin NodeResourceTopologyMatch reads:

- A zone `node-<N>` for every NUMA node from 0 up without a gap, in order, also for a node without
  devices or CPUs: the scheduler indexes arrays by the number. It takes numbers below 64 only.
- Each zone has cpu, memory and every huge page size of the node: if no zone had them, every pod
  asking for them would be rejected here.
- Of a resource's amounts the scheduler reads `available` only.

What the amounts mean:

cpu       capacity: the zone's CPUs. allocatable: those that kubelet hands out (static CPU manager),
          else all but reservedSystemCPUs. available: allocatable without CPUs that containers own
          exclusively. Without the static CPU manager no CPU is owned, so available = allocatable:
          what other pods share is counted at the node level by the scheduler itself.
memory    capacity: the zone's memory. allocatable: what kubelet's memory manager hands out
          (Static), else the zone's memory without huge pages and without reservedMemory.
          available: without the blocks that the memory manager pinned; without a memory
          manager equal to allocatable, as for cpu. Node-wide reservations (kubeReserved,
          systemReserved, eviction) belong to no zone; the scheduler's node-level fit counts them.
hugepages as memory.
devices   capacity: the zone's units. allocatable: healthy ones. available: healthy and held by no
          pod, by PodResources.

The fingerprint counts the pods that PodResources lists. From Kubernetes 1.34 on these are the
admitted pods that have not ended; a scheduler that counts ended pods too sees another set until
they are removed, and then keeps to what it has reserved itself.

A unit without a NUMA node (-1) is in no zone. That is what kubelet does with it too: it has no
part in alignment. If no unit of a resource has a NUMA node, the resource is in no zone, and the
scheduler then accepts it at the node level.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.model.device import NumaNode, Snapshot
from agent.model.unit import OfferedUnit
from agent.topology.fingerprint import METHOD_ALL, fingerprint
from agent.topology.kubelet_config import KubeletSettings
from agent.topology.quantity import page_size_name

API_VERSION = "topology.node.k8s.io/v1alpha2"
KIND = "NodeResourceTopology"
MAX_ZONES = 64


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """Memory as PodResources tells it: `memory_type` is memory or hugepages-<size>."""

    memory_type: str
    size: int
    numa_nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PodUsage:
    """What one pod holds, by PodResources."""

    namespace: str
    name: str
    unit_ids: frozenset[str] = frozenset()
    cpus: frozenset[int] = frozenset()
    memory: tuple[MemoryBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class Allocatable:
    """What kubelet hands out exclusively, by PodResources GetAllocatableResources.

    Empty unless kubelet's CPU manager is static or its memory manager Static.
    """

    cpus: frozenset[int] = frozenset()
    memory: tuple[MemoryBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeState:
    """All that the object is made of."""

    node_name: str
    snapshot: Snapshot
    units: Mapping[str, Sequence[OfferedUnit]]
    pods: tuple[PodUsage, ...] = ()
    allocatable: Allocatable = Allocatable()
    kubelet: KubeletSettings = field(default_factory=KubeletSettings)
    node_uid: str | None = None
    """UID of the Node object, which then owns this one."""


@dataclass(frozen=True, slots=True)
class Amount:
    name: str
    capacity: int
    allocatable: int
    available: int


def build(state: NodeState) -> dict[str, Any] | None:
    """Build the object, or None if the scan found no NUMA node to speak of."""
    nodes = {node.number: node for node in state.snapshot.numa_nodes if 0 <= node.number < MAX_ZONES}
    if not nodes:
        return None
    metadata: dict[str, Any] = {"name": state.node_name}
    if state.node_uid is not None:
        owner = {"apiVersion": "v1", "kind": "Node", "name": state.node_name, "uid": state.node_uid}
        metadata["ownerReferences"] = [owner]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "attributes": [{"name": name, "value": value} for name, value in sorted(_attributes(state).items())],
        "zones": [_zone(number, nodes, state) for number in range(max(nodes) + 1)],
    }


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return one text for one content, to tell whether anything changed."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _attributes(state: NodeState) -> dict[str, str]:
    attributes = {
        "topologyManagerPolicy": state.kubelet.policy,
        "topologyManagerScope": state.kubelet.scope,
        "nodeTopologyPodsFingerprint": fingerprint((pod.namespace, pod.name) for pod in state.pods),
        "nodeTopologyPodsFingerprintMethod": METHOD_ALL,
    }
    if state.kubelet.max_numa_nodes is not None:
        attributes["topologyManagerMaxNUMANodes"] = state.kubelet.max_numa_nodes
    return attributes


def _zone(number: int, nodes: Mapping[int, NumaNode], state: NodeState) -> dict[str, Any]:
    node = nodes.get(number, NumaNode(number, (), 0))
    amounts = [_cpu(node, state), *_memory(node, nodes, state), *_devices(number, state)]
    zone: dict[str, Any] = {"name": f"node-{number}", "type": "Node"}
    if node.distances:
        order = sorted(n.number for n in state.snapshot.numa_nodes)
        zone["costs"] = [
            {"name": f"node-{other}", "value": distance}
            for other, distance in zip(order, node.distances, strict=False)
            if other in nodes
        ]
    zone["resources"] = [
        {"name": a.name, "capacity": str(a.capacity), "allocatable": str(a.allocatable), "available": str(a.available)}
        for a in sorted(amounts, key=lambda a: a.name)
    ]
    return zone


def _cpu(node: NumaNode, state: NodeState) -> Amount:
    mine = frozenset(node.cpus)
    allocatable = mine & state.allocatable.cpus if state.allocatable.cpus else mine - state.kubelet.reserved_cpus
    owned = frozenset().union(*(pod.cpus for pod in state.pods))
    return Amount("cpu", len(mine), len(allocatable), len(allocatable - owned))


def _memory(node: NumaNode, nodes: Mapping[int, NumaNode], state: NodeState) -> Iterable[Amount]:
    huge = {size: count * size for size, count in node.hugepages}
    capacities = {page_size_name(size): 0 for other in nodes.values() for size, _ in other.hugepages}
    capacities |= {page_size_name(size): total for size, total in huge.items()}
    capacities["memory"] = node.memory_bytes
    pinned = [block for pod in state.pods for block in pod.memory]
    for name, capacity in capacities.items():
        handed_out = [block for block in state.allocatable.memory if block.memory_type == name]
        if handed_out:
            allocatable = _share(handed_out, node.number)
        else:
            ordinary = capacity - sum(huge.values()) if name == "memory" else capacity
            reserved = sum(
                size for zone, kind, size in state.kubelet.reserved_memory if (zone, kind) == (node.number, name)
            )
            allocatable = max(0, ordinary - reserved)
        used = _share([block for block in pinned if block.memory_type == name], node.number)
        yield Amount(name, capacity, allocatable, max(0, allocatable - used))


def _share(blocks: Iterable[MemoryBlock], number: int) -> int:
    """Add up what the blocks take from one node; one that spans nodes is split evenly, as nothing tells more."""
    return sum(-(-block.size // len(block.numa_nodes)) for block in blocks if number in block.numa_nodes)


def _devices(number: int, state: NodeState) -> Iterable[Amount]:
    held = frozenset().union(*(pod.unit_ids for pod in state.pods))
    for name, units in state.units.items():
        mine = [unit for unit in units if unit.numa_node == number]
        if mine:
            healthy = [unit for unit in mine if unit.health.healthy]
            free = sum(unit.unit_id not in held for unit in healthy)
            yield Amount(name, len(mine), len(healthy), free)
