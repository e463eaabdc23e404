"""The NodeResourceTopology object (topology.node.k8s.io/v1alpha2) of this node. Pure.

The object says what the scheduler plugin NodeResourceTopologyMatch reads:

- A zone `node-<N>` for every NUMA node from 0 up to the last one with CPUs or devices, without a gap, in order: the
  scheduler indexes arrays by the number. It takes numbers below 64 only. Zones past the last one hold no pod (GB200 has
  34 of them, for GPU memory), but its score LeastNUMANodes enumerates all combinations of zones, and LeastAllocated
  takes a zone without CPUs for a full one.
- Each zone has cpu, memory and every huge page size of the node: if no zone had them, every pod
  asking for them would be rejected here. The amounts are explained below.
- Policy and scope in kubelet's words; the deprecated topologyPolicies say the same to schedulers that
  read no attributes.
- The fingerprint of the node's pods, and by which method it was made. The scheduler takes over what an object says of
  a node only if this equals what it computes from its own list of the node's pods. So the same pods must count here:
  with a dedicated informer (the scheduler's default) all bound pods that are not Pending, those that have ended too;
  with the shared one, Running pods (scheduler-plugins, podprovider). Only the API server knows the phases. By the
  method `with-exclusive-resources` only pods count that own something: extended resources, or, if Guaranteed, whole
  CPUs, memory or huge pages (resourcerequests/exclusive.go). Up to v0.34.7 any extended resource and all init
  containers count; on master the resources of the published zones, and sidecars of the init containers. Without a watch
  of pods those that kubelet lists count, by the method `all`: since Kubernetes 1.34 the admitted ones that have not
  ended, another set than the scheduler's as long as an ended pod is not deleted.

How much of everything each NUMA node has, gives out, and has left, as the scheduler plugin reads it.

The plugin asks one question of a zone: does what this container (or pod) wants fit here? Of the answers it reads
`available` only; whether it fits the node as a whole it asks the default scheduler. kubelet knows two ways of giving
out CPUs and memory, and for each of them something else is true:

                 manager static                          manager none
CPU              allocatable: the zone's CPUs without    allocatable: the zone's CPUs without
                 those that kubelet reserves (listed by  reservedSystemCPUs, at most what the node
                 PodResources); available: without       gives out (all but kubeReserved and
                 those that containers own               systemReserved); available: the same
memory, huge     allocatable: as the memory manager      allocatable: the zone's memory without huge
pages            says (PodResources); available:         pages and reservedMemory, at most what the node
                 without the blocks it has pinned        gives out (all but kubeReserved, systemReserved
                                                         and eviction threshold); available: the same

With manager none nobody knows which zone a pod's share comes from, and kubelet admits whatever fits the node: an
amount taken from the zones would make the scheduler refuse what kubelet takes. On a node of one zone both ways agree
with the node's own allocatable.

Devices are counted one by one. One without a NUMA node (-1) is in no zone: it has no part in alignment for kubelet
either, and a resource that is in no zone is accepted at the node level. Devices of other plugins are listed by
PodResources, which lists the healthy ones only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xxhash import xxh64_intdigest

from agent.cluster.apiserver import TOPOLOGY
from agent.cluster.object_watch import WatchedPod
from agent.cluster.topology.node_view import NodeState, View
from agent.cluster.topology.publisher import Publication
from agent.config.topology import Fingerprint
from agent.kubelet.podresources import MemoryBlock
from agent.model.device import NumaNode, Snapshot
from agent.model.printable import is_memory, milli_text, page_size_name

PREFIX = "pfp0v001"
METHOD_ALL = "all"
DEFAULT = Fingerprint()
MAX_ZONES = 64

_DEPRECATED = {
    ("single-numa-node", "container"): "SingleNUMANodeContainerLevel",
    ("single-numa-node", "pod"): "SingleNUMANodePodLevel",
    ("restricted", "container"): "RestrictedContainerLevel",
    ("restricted", "pod"): "RestrictedPodLevel",
    ("best-effort", "container"): "BestEffortContainerLevel",
    ("best-effort", "pod"): "BestEffortPodLevel",
}


class NodeResourceTopology(Publication):
    """Published for the scheduler plugin."""

    kind = TOPOLOGY
    settles = True

    def __init__(self, view: View) -> None:
        self._view = view

    async def content(self) -> Mapping[str, Any] | None:
        """Build the object of what kubelet reports now."""
        state = await self._view.state()
        return build(state, self._view.config.fingerprint) if state is not None else None


def build(state: NodeState, rule: Fingerprint = DEFAULT) -> dict[str, Any] | None:
    """Build the object, or None if the scan found no NUMA node to speak of.

    `rule` says which of the watched pods the scheduler counts.
    """
    nodes = numa_nodes(state.snapshot)
    if not nodes:
        return None
    every = by_zone(nodes, state)
    used = [n for n, zone in every.items() if any(a.capacity for a in zone if not is_memory(a.name))]
    amounts = {number: zone for number, zone in every.items() if number <= max(used, default=0)}
    attributes = _attributes(state, rule, {a.name for zone in amounts.values() for a in zone})
    policy = _DEPRECATED.get((state.kubelet.policy, state.kubelet.scope), "None")
    return {
        "apiVersion": TOPOLOGY.api_version,
        "kind": TOPOLOGY.kind,
        "metadata": metadata(state),
        "attributes": [{"name": name, "value": value} for name, value in sorted(attributes.items())],
        "topologyPolicies": [policy],
        "zones": [_zone(nodes[number], amounts, state) for number in sorted(amounts)],
    }


def numa_nodes(snapshot: Snapshot) -> dict[int, NumaNode]:
    """Number the NUMA nodes without a gap: a number that this machine has no node of stands for one with nothing."""
    found = {node.number: node for node in snapshot.numa_nodes if 0 <= node.number < MAX_ZONES}
    return {number: found.get(number) or NumaNode(number, (), 0) for number in range(max(found, default=-1) + 1)}


def metadata(state: NodeState) -> dict[str, Any]:
    """Name an object after the node, which owns it: the cluster removes it with the node."""
    found: dict[str, Any] = {"name": state.node_name}
    if state.node_uid is not None:
        owner = {"apiVersion": "v1", "kind": "Node", "name": state.node_name, "uid": state.node_uid}
        found["ownerReferences"] = [owner]
    return found


def _attributes(state: NodeState, rule: Fingerprint, resources: set[str]) -> dict[str, str]:
    if state.watched is not None:
        pods, method = counted(state.watched, rule, resources), rule.method
    else:
        pods, method = [pod.pod.names for pod in state.pods], METHOD_ALL
    attributes = {
        "topologyManagerPolicy": state.kubelet.policy,
        "topologyManagerScope": state.kubelet.scope,
        "nodeTopologyPodsFingerprint": fingerprint(pods),
        "nodeTopologyPodsFingerprintMethod": method,
    }
    if state.kubelet.max_numa_nodes is not None:
        attributes["topologyManagerMaxNUMANodes"] = state.kubelet.max_numa_nodes
    return attributes


def _zone(node: NumaNode, amounts: Mapping[int, Sequence[Amount]], state: NodeState) -> dict[str, Any]:
    zone: dict[str, Any] = {"name": f"node-{node.number}", "type": "Node"}
    if node.distances:
        order = sorted(n.number for n in state.snapshot.numa_nodes)
        zone["costs"] = [
            {"name": f"node-{other}", "value": distance}
            for other, distance in zip(order, node.distances, strict=False)
            if other in amounts
        ]
    zone["resources"] = [amount.document() for amount in amounts[node.number]]
    return zone


def fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """Compute the fingerprint of pods, each given as (namespace, name), in any order."""
    hashes = sorted(xxh64_intdigest(name, seed=xxh64_intdigest(namespace)) for namespace, name in pods)
    return f"{PREFIX}{xxh64_intdigest(b''.join(value.to_bytes(8, 'little') for value in hashes)):016x}"


def counted(pods: Iterable[WatchedPod], rule: Fingerprint, resources: Collection[str]) -> list[tuple[str, str]]:
    """Choose the pods that the scheduler counts, as (namespace, name). `resources` are those of the zones."""
    return [
        (pod.namespace, pod.name)
        for pod in pods
        if (pod.phase == "Running" if rule.pods == "shared" else pod.phase != "Pending")
        and (rule.method == METHOD_ALL or _is_exclusive(pod, rule.rules, resources))
    ]


def _is_exclusive(pod: WatchedPod, rules: str, resources: Collection[str]) -> bool:
    if rules == "master":
        return pod.exclusive_native or not pod.extended.isdisjoint(resources)
    return pod.exclusive_native or bool(pod.extended) or pod.exclusive_init


@dataclass(frozen=True, slots=True)
class Amount:
    """Of one resource in one zone. cpu is in thousandths, all else in whole numbers or bytes."""

    name: str
    capacity: int
    allocatable: int
    available: int

    def document(self) -> dict[str, str]:
        """Return what the object says of it."""
        text = milli_text if self.name == "cpu" else str
        return {
            "name": self.name,
            "capacity": text(self.capacity),
            "allocatable": text(self.allocatable),
            "available": text(self.available),
        }


def by_zone(nodes: Mapping[int, NumaNode], state: NodeState) -> dict[int, list[Amount]]:
    """Compute the amounts of each zone, by name."""
    memory, devices = _memory(nodes, state), _devices(state)
    return {
        number: sorted(
            (_cpu(node, nodes, state), *memory[number], *devices.get(number, ())), key=lambda amount: amount.name
        )
        for number, node in nodes.items()
    }


def _cpu(node: NumaNode, nodes: Mapping[int, NumaNode], state: NodeState) -> Amount:
    mine = frozenset(node.cpus)
    if state.allocatable.cpu_ids:
        handed_out = mine.intersection(state.allocatable.cpu_ids)
        return Amount("cpu", len(mine) * 1000, len(handed_out) * 1000, len(handed_out - state.owned_cpus) * 1000)
    whole = 1000 * sum(len(other.cpus) for other in nodes.values())
    kubelet = state.kubelet
    rest = whole - (1000 * len(kubelet.reserved_cpus) if kubelet.reserved_cpus else kubelet.reserved_milli_cpu)
    allocatable = max(0, min(1000 * len(mine - kubelet.reserved_cpus), rest))
    return Amount("cpu", len(mine) * 1000, allocatable, allocatable)


def _memory(nodes: Mapping[int, NumaNode], state: NodeState) -> dict[int, list[Amount]]:
    capacities = {number: _capacities(node, nodes) for number, node in nodes.items()}
    found: dict[int, list[Amount]] = {number: [] for number in nodes}
    owned = [b for pod in state.pods for of in (pod.memory, *(c.memory for c in pod.containers)) for b in of]
    for name in sorted({name for amounts in capacities.values() for name in amounts}):
        blocks = [block for block in state.allocatable.memory if block.memory_type == name]
        allocatable = _handed_out(blocks, nodes) if blocks else _computed(name, capacities, nodes, state)
        pinned = [block for block in owned if block.memory_type == name]
        available = _without(allocatable, pinned)
        for number in nodes:
            capacity = capacities[number][name]
            given = min(allocatable[number], capacity)
            found[number].append(Amount(name, capacity, given, min(available[number], given)))
    return found


def _capacities(node: NumaNode, nodes: Mapping[int, NumaNode]) -> dict[str, int]:
    """List a zone's memory and huge pages, with every page size that any zone knows."""
    sizes = {size for other in nodes.values() for size, _ in other.hugepages}
    counts = dict(node.hugepages)
    return {"memory": node.memory_bytes} | {page_size_name(size): size * counts.get(size, 0) for size in sizes}


def _handed_out(blocks: Iterable[MemoryBlock], nodes: Mapping[int, NumaNode]) -> dict[int, int]:
    """Add up what kubelet's memory manager gives out, by zone. It names one zone a block."""
    found = dict.fromkeys(nodes, 0)
    for block in blocks:
        for number in block.numa_nodes:
            if number in found:
                found[number] += block.size // len(block.numa_nodes)
    return found


def _computed(
    name: str, capacities: Mapping[int, Mapping[str, int]], nodes: Mapping[int, NumaNode], state: NodeState
) -> dict[int, int]:
    """Compute what kubelet gives out where no memory manager reports it."""
    ordinary = {
        number: amounts[name] - (sum(amounts.values()) - amounts[name] if name == "memory" else 0)
        for number, amounts in capacities.items()
    }
    kubelet = state.kubelet
    reserved: Counter[int] = Counter()
    for number, kind, size in kubelet.reserved_memory:
        if kind == name:
            reserved[number] += size
    rest = sum(ordinary.values())
    if name == "memory":
        share = int(kubelet.eviction_share * sum(node.memory_bytes for node in nodes.values()))
        rest -= kubelet.reserved_memory_bytes + kubelet.eviction_bytes + share
    return {number: max(0, min(amount - reserved[number], rest)) for number, amount in ordinary.items()}


def _without(amounts: Mapping[int, int], blocks: Iterable[MemoryBlock]) -> dict[int, int]:
    """Take pinned blocks off. One that spans zones fills them in order, as kubelet's memory manager does.

    (pkg/kubelet/cm/memorymanager, updateMachineState.) Blocks of fewer zones go first: nothing shows in which order
    kubelet gave them out, and these leave no choice.
    """
    left = dict(amounts)
    for block in sorted(blocks, key=lambda block: (len(block.numa_nodes), block.numa_nodes, block.size)):
        missing = block.size
        for number in sorted(block.numa_nodes):
            taken = min(missing, left.get(number, 0))
            if taken:
                left[number] -= taken
                missing -= taken
    return left


def _devices(state: NodeState) -> dict[int, list[Amount]]:
    """Count our units, and the devices of other plugins: one writer publishes them all.

    A slot counts where it stands, whether a device is bound to it or not.
    """
    held = {unit for pod in state.pods for container in pod.containers for unit in container.units}
    counts: dict[tuple[int, str], list[int]] = {}

    def add(zone: int, name: str, *numbers: int) -> None:
        before = counts.get((zone, name), (0, 0, 0))
        counts[zone, name] = [had + more for had, more in zip(before, numbers, strict=True)]

    for name, units in state.units.items():
        for unit in units:
            if unit.numa_node >= 0:
                healthy = unit.health.healthy
                add(unit.numa_node, name, 1, healthy, healthy and (name, unit.unit_id) not in held)
    for device in state.allocatable.devices:
        name, count = device.resource_name, len(device.device_ids)
        if name not in state.units:
            free = sum((name, unit) not in held for unit in device.device_ids)
            for number in device.numa_nodes:
                add(number, name, count, count, free)
    found: dict[int, list[Amount]] = {}
    for (zone, name), numbers in counts.items():
        found.setdefault(zone, []).append(Amount(name, *numbers))
    return found
