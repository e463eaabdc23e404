"""The table of localities between GPUs and NICs that `nvidia-smi topo -m` made familiar. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent.model.device import NO_NUMA_NODE, Gpu, PciDevice, Snapshot
from agent.model.topology import Locality, locality

_MEANING = {
    Locality.PIX: "at most one PCIe switch between them",
    Locality.PXB: "several PCIe switches, not the host bridge",
    Locality.PHB: "through the host bridge of one root complex",
    Locality.NODE: "between host bridges of one NUMA node",
    Locality.SYS: "across the link between NUMA nodes, or unknown",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One GPU or NIC of the table."""

    label: str
    """GPU0 or NIC0."""
    device: PciDevice | None
    """None for a GPU whose PCI function the scan does not show."""
    address: str
    title: str

    @property
    def numa_node(self) -> int:
        return self.device.numa_node if self.device is not None else NO_NUMA_NODE


def rows(snapshot: Snapshot) -> tuple[Row, ...]:
    """List the GPUs in the driver's order, then the NICs by address; VFs are where their PF is."""
    gpus = [
        Row(f"GPU{gpu.index}", snapshot.by_address.get(gpu.pci_address), gpu.pci_address, gpu.name)
        for gpu in sorted(snapshot.gpus, key=lambda gpu: gpu.index)
    ]
    nics = [
        Row(f"NIC{number}", device, device.address, _names(device))
        for number, device in enumerate(d for d in snapshot.devices if _is_nic(d))
    ]
    return (*gpus, *nics)


def nearest_nics(gpu: Gpu, snapshot: Snapshot) -> tuple[PciDevice, ...]:
    """List the NICs nearest to a GPU: several if they are equally near, none if the node has none.

    NICs with an RDMA device come before any without.
    """
    own = snapshot.by_address.get(gpu.pci_address)
    nics = [d for d in snapshot.devices if _is_nic(d)]
    candidates = [d for d in nics if d.rdma_devices] or nics
    if own is None or not candidates:
        return ()
    distance = {d.address: locality(own, d) for d in candidates}
    best = min(distance.values())
    return tuple(d for d in candidates if distance[d.address] == best)


def as_text(snapshot: Snapshot) -> str:
    """Draw the table with a legend, for a terminal."""
    table = rows(snapshot)
    if not table:
        return "This node has neither GPUs nor NICs."
    labels = [row.label for row in table]
    lines = [["", *labels, "NUMA"]]
    for row in table:
        numa = "-" if row.numa_node == NO_NUMA_NODE else str(row.numa_node)
        lines.append([row.label, *(_cell(row, other) for other in table), numa])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    drawn = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    width = max(map(len, labels))
    drawn += ["", *(f"{row.label:<{width}}  {row.address}  {row.title}" for row in table)]
    paired = [(gpu, nearest_nics(gpu, snapshot)) for gpu in _gpus(snapshot)]
    if any(nics for _, nics in paired):
        label_of = {row.address: row.label for row in table}
        drawn += ["", "Nearest NICs:"]
        drawn += [f"{f'GPU{gpu.index}':<{width}}  {_listed(gpu, nics, label_of, snapshot)}" for gpu, nics in paired]
    drawn += ["", *(f"{place.name:<4}  {meaning}" for place, meaning in _MEANING.items())]
    return "\n".join(drawn)


def as_document(snapshot: Snapshot) -> dict[str, Any]:
    """Give the same table as values that JSON can carry."""
    table = rows(snapshot)
    label_of = {row.address: row.label for row in table}
    return {
        "devices": [
            {
                "label": row.label,
                "pci_address": row.address,
                "title": row.title,
                "numa_node": None if row.numa_node == NO_NUMA_NODE else row.numa_node,
            }
            for row in table
        ],
        "locality": {
            row.label: {other.label: place.name for other in table if (place := _place(row, other)) is not None}
            for row in table
        },
        "nearest_nics": {
            f"GPU{gpu.index}": [label_of[nic.address] for nic in nearest_nics(gpu, snapshot)] for gpu in _gpus(snapshot)
        },
    }


def _gpus(snapshot: Snapshot) -> Sequence[Gpu]:
    return sorted(snapshot.gpus, key=lambda gpu: gpu.index)


def _is_nic(device: PciDevice) -> bool:
    return not device.is_vf and bool(device.netdevs or device.rdma_devices)


def _names(device: PciDevice) -> str:
    names = [r.name for r in device.rdma_devices] + [n.name for n in device.netdevs if not n.is_representor]
    return " ".join(names)


def _place(row: Row, other: Row) -> Locality | None:
    if row.device is None or other.device is None:
        return None
    return locality(row.device, other.device)


def _cell(row: Row, other: Row) -> str:
    if row is other:
        return "X"
    place = _place(row, other)
    return "?" if place is None else place.name


def _listed(gpu: Gpu, nics: Sequence[PciDevice], label_of: dict[str, str], snapshot: Snapshot) -> str:
    if not nics:
        return "-"
    place = locality(snapshot.by_address[gpu.pci_address], nics[0])
    return f"{place.name:<4}  {' '.join(label_of[nic.address] for nic in nics)}"
