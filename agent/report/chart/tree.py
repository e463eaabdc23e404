"""The PCIe tree: NUMA nodes, host bridges and switches down to GPUs and NICs. VFs are where their PF is.

Ports that lead to one thing only are told in one breath with it, so that what remains are the places where
traffic of two devices can meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.model.device import NO_NUMA_NODE, NumaNode, PciDevice, Snapshot, is_accelerator


@dataclass(frozen=True, slots=True)
class Leaf:
    """A GPU or a NIC."""

    address: str


@dataclass(frozen=True, slots=True)
class Bridge:
    """Where several devices meet, or the way to one: a host bridge, root ports, switches."""

    names: tuple[str, ...]
    """From above: `pci0000:15`, then the addresses of ports and switches with nothing else between them."""
    below: tuple[Bridge | Leaf, ...]


@dataclass(frozen=True, slots=True)
class NumaGroup:
    """What hangs on one NUMA node; `NO_NUMA_NODE` for what the firmware did not place."""

    number: int
    cpus: str
    """As the kernel lists them: 0-55,112-167."""
    below: tuple[Bridge, ...]


def tree(snapshot: Snapshot) -> tuple[NumaGroup, ...]:
    """Arrange the GPUs and NICs of a snapshot, GPUs first. NUMA nodes without any are left out.

    A Data Direct function stands beside its GPU, and its PF where that is.
    """
    gpus = {gpu.pci_address for gpu in snapshot.all_gpus}
    roots: dict[str, Any] = {}
    numa_of: dict[str, int] = {}
    for device in sorted(drawn(snapshot), key=lambda device: device.address not in gpus):
        *way, own = device.path if len(device.path) > 1 else ("pci", device.address)
        top, branch = way[0], roots
        for name in way:
            branch = branch.setdefault(name, {})
        branch[own] = None
        if numa_of.get(top, NO_NUMA_NODE) == NO_NUMA_NODE:
            numa_of[top] = device.numa_node
    nodes = {node.number: node for node in snapshot.numa_nodes}
    return tuple(
        NumaGroup(
            number,
            cpu_list(nodes[number]) if number in nodes else "",
            tuple(_bridge((top,), below) for top, below in roots.items() if numa_of[top] == number),
        )
        for number in sorted(set(numa_of.values()), key=lambda n: (n == NO_NUMA_NODE, n))
    )


def drawn(snapshot: Snapshot) -> tuple[PciDevice, ...]:
    """List the devices that the tree shows: NICs with their Data Direct functions, and GPUs; no VFs."""
    known = {*(gpu.pci_address for gpu in snapshot.all_gpus), *snapshot.data_direct.of.values()}
    return tuple(d for d in snapshot.devices if not d.is_vf and (is_nic(d) or d.address in known))


def is_nic(device: PciDevice) -> bool:
    """Tell whether a device is a network adapter, also one that a program drives. Accelerators with ports are none."""
    return not (device.is_vf or is_accelerator(device)) and bool(
        device.netdevs or device.rdma_devices or device.is_network
    )


def leaves(below: Sequence[Bridge | Leaf]) -> Iterator[str]:
    """List the addresses of all devices further down."""
    for part in below:
        if isinstance(part, Leaf):
            yield part.address
        else:
            yield from leaves(part.below)


def cpu_list(node: NumaNode) -> str:
    """Spell the CPUs of a NUMA node as the kernel does: 0-55,112-167."""
    spans: list[list[int]] = []
    for cpu in sorted(node.cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def as_document(groups: Sequence[NumaGroup]) -> list[dict[str, Any]]:
    """Give the tree as values that JSON can carry."""
    return [
        {
            "numaNode": None if group.number == NO_NUMA_NODE else group.number,
            "cpus": group.cpus,
            "below": [_document(part) for part in group.below],
        }
        for group in groups
    ]


def _document(part: Bridge | Leaf) -> dict[str, Any]:
    if isinstance(part, Leaf):
        return {"device": part.address}
    return {"bridges": list(part.names), "below": [_document(child) for child in part.below]}


def _bridge(names: tuple[str, ...], below: Mapping[str, Any]) -> Bridge:
    while len(below) == 1:
        ((name, further),) = below.items()
        if further is None:
            break
        names, below = (*names, name), further
    return Bridge(names, tuple(_part(name, further) for name, further in below.items()))


def _part(name: str, below: Mapping[str, Any] | None) -> Bridge | Leaf:
    if below is None:
        return Leaf(name)
    made = _bridge((name,), below)
    only = made.below[0] if len(made.below) == 1 else None
    return only if isinstance(only, Leaf) else made
