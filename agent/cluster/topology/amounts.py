"""How much of everything each NUMA node has, gives out, and has left, as the scheduler plugin reads it. Pure.

The plugin asks one question of a zone: does what this container (or pod) wants fit here? Of the answers it reads
`available` only; whether it fits the node as a whole it asks the default scheduler. kubelet knows two ways of giving
out CPUs and memory, and for each of them something else is true:

                 manager static                          manager none
CPU              allocatable: the zone's CPUs without    allocatable: the zone's CPUs without
                 those that kubelet reserves (told by    reservedSystemCPUs, at most what the node
                 PodResources); available: without       gives out (all but kubeReserved and
                 those that containers own               systemReserved); available: the same
memory, huge     allocatable: as the memory manager      allocatable: the zone's memory without huge
pages            tells (PodResources); available:        pages and reservedMemory, at most what the node
                 without the blocks it has pinned        gives out (all but kubeReserved, systemReserved
                                                         and eviction threshold); available: the same

With manager none nobody knows which zone a pod's share comes from, and kubelet admits whatever fits the node: an
amount taken from the zones would make the scheduler refuse what kubelet takes. On a node of one zone both ways agree
with the node's own allocatable.

Devices are counted one by one. One without a NUMA node (-1) is in no zone: it has no part in alignment for kubelet
either, and a resource that is in no zone is accepted at the node level. Devices of other plugins are told by
PodResources, which lists the healthy ones only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from agent.cluster.topology.state import MemoryBlock, NodeState
from agent.model.device import NumaNode
from agent.model.printable import milli_text, page_size_name


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


def by_zone(numbers: Iterable[int], nodes: Mapping[int, NumaNode], state: NodeState) -> dict[int, tuple[Amount, ...]]:
    """Compute the amounts of these zones, by name. A number that is no NUMA node of this machine has nothing."""
    memory = _memory(nodes, state)
    devices = _devices(state)
    return {
        number: tuple(
            sorted(
                (
                    _cpu(nodes.get(number), nodes, state),
                    *(memory.get(number) or _no_memory(nodes)),
                    *devices.get(number, ()),
                ),
                key=lambda amount: amount.name,
            )
        )
        for number in numbers
    }


def _cpu(node: NumaNode | None, nodes: Mapping[int, NumaNode], state: NodeState) -> Amount:
    mine = frozenset(node.cpus) if node is not None else frozenset[int]()
    if state.allocatable.cpus:
        handed_out = mine & state.allocatable.cpus
        owned = frozenset[int]().union(*(pod.cpus for pod in state.pods))
        return Amount("cpu", len(mine) * 1000, len(handed_out) * 1000, len(handed_out - owned) * 1000)
    whole = 1000 * sum(len(other.cpus) for other in nodes.values())
    kubelet = state.kubelet
    rest = whole - (1000 * len(kubelet.reserved_cpus) if kubelet.reserved_cpus else kubelet.reserved_milli_cpu)
    allocatable = max(0, min(1000 * len(mine - kubelet.reserved_cpus), rest))
    return Amount("cpu", len(mine) * 1000, allocatable, allocatable)


def _memory(nodes: Mapping[int, NumaNode], state: NodeState) -> dict[int, tuple[Amount, ...]]:
    capacities = {number: _capacities(node, nodes) for number, node in nodes.items()}
    found: dict[int, list[Amount]] = {number: [] for number in nodes}
    for name in sorted({name for amounts in capacities.values() for name in amounts}):
        told = [block for block in state.allocatable.memory if block.memory_type == name]
        allocatable = _told(told, nodes) if told else _reckoned(name, capacities, nodes, state)
        pinned = [block for pod in state.pods for block in pod.memory if block.memory_type == name]
        available = _without(allocatable, pinned)
        for number in nodes:
            capacity = capacities[number][name]
            given = min(allocatable[number], capacity)
            found[number].append(Amount(name, capacity, given, min(available[number], given)))
    return {number: tuple(amounts) for number, amounts in found.items()}


def _no_memory(nodes: Mapping[int, NumaNode]) -> tuple[Amount, ...]:
    return tuple(Amount(name, 0, 0, 0) for name in _capacities(NumaNode(-1, (), 0), nodes))


def _capacities(node: NumaNode, nodes: Mapping[int, NumaNode]) -> dict[str, int]:
    """List a zone's memory and huge pages, with every page size that any zone knows."""
    sizes = {size for other in nodes.values() for size, _ in other.hugepages}
    counts = dict(node.hugepages)
    return {"memory": node.memory_bytes} | {page_size_name(size): size * counts.get(size, 0) for size in sizes}


def _told(blocks: Iterable[MemoryBlock], nodes: Mapping[int, NumaNode]) -> dict[int, int]:
    """Add up what kubelet's memory manager gives out, by zone. It tells one zone a block."""
    found = dict.fromkeys(nodes, 0)
    for block in blocks:
        for number in block.numa_nodes:
            if number in found:
                found[number] += block.size // len(block.numa_nodes)
    return found


def _reckoned(
    name: str, capacities: Mapping[int, Mapping[str, int]], nodes: Mapping[int, NumaNode], state: NodeState
) -> dict[int, int]:
    """Reckon what kubelet gives out where no memory manager tells."""
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

    (pkg/kubelet/cm/memorymanager, updateMachineState.) Blocks of fewer zones go first: nothing tells in which order
    kubelet gave them out, and these leave no choice.
    """
    left = dict(amounts)
    for block in sorted(blocks, key=lambda block: (len(block.numa_nodes), block.numa_nodes, block.size)):
        owed = block.size
        for number in sorted(block.numa_nodes):
            taken = min(owed, left.get(number, 0))
            if taken:
                left[number] -= taken
                owed -= taken
    return left


def _devices(state: NodeState) -> dict[int, list[Amount]]:
    held = frozenset[tuple[str, str]]().union(*(pod.units for pod in state.pods))
    found: dict[int, list[Amount]] = {}
    for name, counts in (*_own(state, held), *_foreign(state, held)):
        for number, (capacity, allocatable, available) in counts.items():
            found.setdefault(number, []).append(Amount(name, capacity, allocatable, available))
    return found


Counts = dict[int, list[int]]
"""Zone → capacity, allocatable, available."""


def _own(state: NodeState, held: frozenset[tuple[str, str]]) -> Iterator[tuple[str, Counts]]:
    """Count our units. A slot counts where it stands, whether a device is bound to it or not."""
    for name, units in state.units.items():
        counts: Counts = {}
        for unit in units:
            if unit.numa_node >= 0:
                count = counts.setdefault(unit.numa_node, [0, 0, 0])
                count[0] += 1
                count[1] += unit.health.healthy
                count[2] += unit.health.healthy and (name, unit.unit_id) not in held
        yield name, counts


def _foreign(state: NodeState, held: frozenset[tuple[str, str]]) -> Iterator[tuple[str, Counts]]:
    """Count the devices of other plugins: one writer publishes them all."""
    found: dict[str, Counts] = {}
    for device in state.allocatable.devices:
        if device.resource_name in state.units:
            continue
        counts = found.setdefault(device.resource_name, {})
        free = sum((device.resource_name, unit) not in held for unit in device.device_ids)
        for number in device.numa_nodes:
            count = counts.setdefault(number, [0, 0, 0])
            count[0] += len(device.device_ids)
            count[1] += len(device.device_ids)
            count[2] += free
    yield from found.items()
