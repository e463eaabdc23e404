"""How GPUs and NICs of a node hang together: the table of localities that `nvidia-smi topo -m` made familiar, and the
PCIe tree (NUMA nodes, host bridges and switches down to GPUs and NICs; VFs are where their PF is). Pure.

In the tree, ports that lead to one thing only are told in one breath with it, so that what remains are the places where
traffic of two devices can meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.model.cloud_topology import is_virtual
from agent.model.device import NO_NUMA_NODE, Gpu, PciDevice, Snapshot, cpu_list, is_accelerator
from agent.model.locality import Locality, locality, standing
from agent.model.printable import joined, some
from agent.placement import Distances
from agent.report.status_text import table as in_columns

AMD = 0x1002
_MEANING = {
    "PIX": "at most one PCIe switch between them",
    "PXB": "several PCIe switches, or a GPU's own bridges; not the host bridge",
    "PHB": "through the host bridge of one root complex",
    "NODE": "between host bridges of one NUMA node",
    "SYS": "across the link between NUMA nodes, or unknown",
    "NV#": "over # NVLinks",
    "XGMI#": "over # xGMI links",
}
NEARNESS_UNKNOWN = (
    "this machine shows no PCIe switch that a GPU and a NIC have in common, so only their NUMA nodes count"
)
NEARNESS_REMEDY = "name NCCL's topology file of this kind of machine in placement.topologyFile"
DATA_DIRECT_REMEDY = (
    "run `lspci -vv` as root: an adapter's PF and its Data Direct function (15b3:2100) have the same V3 in their vital"
    " product data; reset an adapter that does not answer, or update its firmware"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One GPU, NIC or VF of the table."""

    label: str
    """GPU0, NIC0, or NIC0v3 for the VF 3 of NIC0."""
    device: PciDevice | None
    """None for a GPU whose PCI function the scan does not show."""
    address: str
    title: str
    gpu: Gpu | None = None

    @property
    def numa_node(self) -> int:
        return self.device.numa_node if self.device is not None else NO_NUMA_NODE


def rows(snapshot: Snapshot, *, with_vfs: bool = False) -> tuple[Row, ...]:
    """List the GPUs, those of NVML's first, then the NICs by address, each followed by its VFs if asked."""
    found = [
        Row(f"GPU{gpu.index}", snapshot.by_address.get(gpu.pci_address), gpu.pci_address, gpu.name, gpu)
        for gpu in snapshot.all_gpus
    ]
    for number, device in enumerate(d for d in snapshot.devices if is_nic(d)):
        found.append(Row(f"NIC{number}", device, device.address, _title(device, folded=not with_vfs)))
        vfs = [snapshot.by_address[vf] for vf in device.vfs if vf in snapshot.by_address] if with_vfs else []
        found += [Row(f"NIC{number}v{_index(vf, i)}", vf, vf.address, _names(vf)) for i, vf in enumerate(vfs)]
    return tuple(found)


def rails(snapshot: Snapshot) -> tuple[tuple[Gpu, tuple[PciDevice, ...], Locality | None], ...]:
    """Pair each GPU with the NICs nearest to it, and say how near that is.

    These are several if they are equally near, none if the node has none. NICs with an RDMA device come before any
    without.
    """
    distances = Distances(snapshot)
    nics = [d for d in snapshot.devices if is_nic(d)]
    candidates = [d.address for d in nics if d.rdma_devices] or [d.address for d in nics]
    found = []
    for gpu in snapshot.all_gpus:
        near = distances.nearest(gpu.uuid, candidates) if gpu.pci_address in snapshot.by_address else ()
        place = distances.between(gpu.uuid, near[0]) if near else None
        found.append((gpu, tuple(snapshot.by_address[nic] for nic in near), place))
    return tuple(found)


def why_not_known(snapshot: Snapshot) -> tuple[str, str] | None:
    """Say why it is not known how near GPUs and NICs are, of all of them or of some, and the remedy."""
    if unknown := unknown_nics(snapshot):
        return f"which GPUs {some(unknown)} stands beside is not known: {_cause(snapshot)}", DATA_DIRECT_REMEDY
    return None if _tells(snapshot) else (NEARNESS_UNKNOWN, NEARNESS_REMEDY)


def unknown_nics(snapshot: Snapshot) -> tuple[str, ...]:
    """List the adapters of which it is not known where their traffic with GPUs enters the PCI tree."""
    unknown = snapshot.data_direct.unknown if snapshot.all_gpus else ()
    found = (d.address for d in snapshot.devices if d.address in unknown and is_nic(d))
    return tuple(address for address in found if address not in snapshot.places.of)


def _cause(snapshot: Snapshot) -> str:
    if snapshot.adapter_ids_due:
        return "vital product data is still being read"
    problems = [f"{problem.path} {problem.text}" for problem in snapshot.problems if problem.path.endswith("/vpd")]
    if problems:
        return _first(problems)
    read = dict(snapshot.adapter_ids)
    lone = [function for function in snapshot.data_direct.unpaired if function in read]
    if lone:
        return f"no PF belongs to the Data Direct function {_first(lone)}, by keyword V3 of their vital product data"
    return "no Data Direct function has the same V3 in its vital product data"


def _first(functions: Sequence[str]) -> str:
    return functions[0] + (f" (the first of {len(functions)} such functions)" if len(functions) > 1 else "")


def _tells(snapshot: Snapshot) -> bool:
    """Where the machine is no virtual one and there are bridges above GPUs or NICs, the PCI tree is the truth."""
    found = rails(snapshot)
    tells = any(place is not None and place < Locality.PHB for _, _, place in found)
    return (
        tells
        or not any(len(nics) > 1 for _, nics, _ in found)
        or not (is_virtual(snapshot.machine) or _flat(found, snapshot))
    )


def _flat(found: Iterable[tuple[Gpu, tuple[PciDevice, ...], Locality | None]], snapshot: Snapshot) -> bool:
    """Say whether no bridge is above any GPU or NIC: some clouds' machines do not even say that they are virtual."""
    gpus = [snapshot.by_address[gpu.pci_address] for gpu, nics, _ in found if nics]
    return all(len(device.path) <= 2 for device in (*gpus, *(nic for _, nics, _ in found for nic in nics)))


def as_text(snapshot: Snapshot, *, with_vfs: bool = False) -> str:
    """Draw the table with a legend, for a terminal."""
    table = rows(snapshot, with_vfs=with_vfs)
    if not table:
        return "This node has neither GPUs nor NICs."
    labels, distances = [row.label for row in table], Distances(snapshot)
    cpus = {node.number: cpu_list(node.cpus) for node in snapshot.numa_nodes}
    lines = []
    seen = set[str]()
    for row in table:
        cells = [_cell(row, other, snapshot, distances) for other in table]
        seen.update(cells)
        numa = "-" if row.numa_node == NO_NUMA_NODE else str(row.numa_node)
        lines.append([row.label, *cells, cpus.get(row.numa_node) or "-", numa])
    drawn = in_columns(["", *labels, "CPU Affinity", "NUMA Affinity"], lines)
    width = max(map(len, labels))
    drawn += ["", *(f"{row.label:<{width}}  {row.address}  {_shown(row, snapshot)}".rstrip() for row in table)]
    found = rails(snapshot)
    if any(nics for _, nics, _ in found):
        label_of = {row.address: row.label for row in table}
        drawn += ["", "Nearest NICs:"]
        drawn += [f"{f'GPU{gpu.index}':<{width}}  {_listed(nics, place, label_of)}" for gpu, nics, place in found]
    if snapshot.places.source:
        drawn += ["", f"What hangs on one switch is told by {snapshot.places.source}, not by the PCI tree."]
    if (unknown := why_not_known(snapshot)) and not (snapshot.places.source and unknown[0] == NEARNESS_UNKNOWN):
        drawn += ["", f"How near they are is not known: {unknown[0]}; {unknown[1]}."]
    drawn += ["", *_legend(seen)]
    return joined(drawn)


def as_document(snapshot: Snapshot, *, with_vfs: bool = False) -> dict[str, Any]:
    """Give the same table as values that JSON can carry."""
    table, distances = rows(snapshot, with_vfs=with_vfs), Distances(snapshot)
    label_of = {row.address: row.label for row in table}
    function_of = snapshot.data_direct.of
    cpus = {node.number: cpu_list(node.cpus) for node in snapshot.numa_nodes}
    return {
        "devices": [
            {
                "label": row.label,
                "pci_address": row.address,
                "title": row.title,
                "numa_node": None if row.numa_node == NO_NUMA_NODE else row.numa_node,
                "cpus": cpus.get(row.numa_node, ""),
                **({"vfs": len(row.device.vfs)} if row.device is not None and row.device.vfs else {}),
                **({"data_direct": function_of[row.address]} if row.address in function_of else {}),
            }
            for row in table
        ],
        "locality": {
            row.label: {
                other.label: place.name
                for other in table
                if (place := _place(row, other, snapshot, distances)) is not None
            }
            for row in table
        },
        "nvlinks": {
            row.label: {other.label: links for other in table if other is not row and (links := _nvlinks(row, other))}
            for row in table
            if row.gpu is not None and row.gpu.nvlinks
        },
        "nearest_nics": {
            f"GPU{gpu.index}": [label_of[nic.address] for nic in nics] for gpu, nics, _ in rails(snapshot)
        },
    }


def _title(device: PciDevice, *, folded: bool) -> str:
    vfs = f"({len(device.vfs)} VFs)" if folded and device.vfs else ""
    return " ".join(filter(None, (_names(device), vfs)))


def _names(device: PciDevice) -> str:
    names = [r.name for r in device.rdma_devices] + [n.name for n in device.netdevs if not n.is_representor]
    return " ".join(names)


def _index(vf: PciDevice, position: int) -> int:
    return position if vf.vf_index is None else vf.vf_index


def _shown(row: Row, snapshot: Snapshot) -> str:
    function = snapshot.data_direct.of.get(row.address)
    return f"{row.title}  towards GPUs where {function} is (Data Direct)" if function is not None else row.title


def _place(row: Row, other: Row, snapshot: Snapshot, distances: Distances) -> Locality | None:
    if row.device is None or other.device is None:
        return None
    if (row.gpu is None) != (other.gpu is None):
        a, b = distances.port(row.address), distances.port(other.address)
        return distances.between(a, b) if distances.is_known(a, b) else None
    here, there = standing(row.device, snapshot.places), standing(other.device, snapshot.places)
    return locality(here, there, one_numa_node=len(snapshot.numa_nodes) <= 1)


def _nvlinks(row: Row, other: Row) -> int:
    if row.gpu is None or other.gpu is None:
        return 0
    return dict(row.gpu.nvlinks).get(other.gpu.uuid, 0)


def _cell(row: Row, other: Row, snapshot: Snapshot, distances: Distances) -> str:
    if row is other:
        return "X"
    if links := _nvlinks(row, other):
        is_amd = row.device is not None and row.device.vendor == AMD
        return f"{'XGMI' if is_amd else 'NV'}{links}"
    place = _place(row, other, snapshot, distances)
    return "?" if place is None else place.name


def _legend(seen: Iterable[str]) -> list[str]:
    """Explain the words of the PCIe tree, and the others that occur."""
    words = dict(_MEANING)
    for word in ("NV#", "XGMI#"):
        if not any(cell.startswith(word[:-1]) for cell in seen):
            del words[word]
    if "?" in seen:
        words["?"] = "not known"
    return [f"{word:<5} {meaning}" for word, meaning in words.items()]


def _listed(nics: Sequence[PciDevice], place: Locality | None, label_of: Mapping[str, str]) -> str:
    if place is None:
        return "-"
    return f"{place.name:<4}  {' '.join(label_of[nic.address] for nic in nics)}"


# ------------------------------------------------------------------------------------------------------------ tree


Branch = dict[str, Any]


def tree(snapshot: Snapshot) -> list[Branch]:
    """Arrange the GPUs and NICs of a snapshot below NUMA nodes, GPUs first, as values that JSON can carry.

    NUMA nodes without any are left out; `numaNode` is None for what the firmware did not place. Below each are
    `bridges` (from above: `pci0000:15`, then ports and switches with nothing else between them), or a `device`. A Data
    Direct function stands beside its GPU, and its PF where that is.
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
    cpus = {node.number: cpu_list(node.cpus) for node in snapshot.numa_nodes}
    return [
        {
            "numaNode": None if number == NO_NUMA_NODE else number,
            "cpus": cpus.get(number, ""),
            "below": [_branch([top], below) for top, below in roots.items() if numa_of[top] == number],
        }
        for number in sorted(set(numa_of.values()), key=lambda n: (n == NO_NUMA_NODE, n))
    ]


def drawn(snapshot: Snapshot) -> tuple[PciDevice, ...]:
    """List the devices that the tree shows: NICs with their Data Direct functions, and GPUs; no VFs."""
    known = {*(gpu.pci_address for gpu in snapshot.all_gpus), *snapshot.data_direct.of.values()}
    return tuple(d for d in snapshot.devices if not d.is_vf and (is_nic(d) or d.address in known))


def is_nic(device: PciDevice) -> bool:
    """Return whether a device is a network adapter, also one that programs drive. Accelerators with ports are none."""
    return not (device.is_vf or is_accelerator(device)) and bool(
        device.netdevs or device.rdma_devices or device.is_network
    )


def _branch(bridges: list[str], below: Mapping[str, Any]) -> Branch:
    while len(below) == 1:
        ((name, further),) = below.items()
        if further is None:
            break
        bridges, below = [*bridges, name], further
    return {"bridges": bridges, "below": [_part(name, further) for name, further in below.items()]}


def _part(name: str, below: Mapping[str, Any] | None) -> Branch:
    if below is None:
        return {"device": name}
    made = _branch([name], below)
    (only, *others) = made["below"]
    return only if not others and "device" in only else made
