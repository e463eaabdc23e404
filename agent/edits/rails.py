"""Files that tell a container of its pod's rails: rails.json, and a topology file for NCCL. Pure.

docs/libraries.md describes rails.json; VERSION counts up when a key changes its meaning or goes. The topology file is
what NCCL takes as NCCL_TOPO_FILE: where each GPU and NIC stands, for hosts whose sysfs does not show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.edits.told import Nic
from agent.model.device import NO_NUMA_NODE, Gpu, Snapshot, cpu_list
from agent.model.lldp import Neighbour
from agent.model.topology import Locality
from agent.placement import Distances
from agent.placement.matching import assign

VERSION = 1


@dataclass(frozen=True)
class Place:
    """What of the node a pod's rails are told by."""

    snapshot: Snapshot
    distances: Distances
    numbers: Mapping[str, int]
    """Adapter → number of its rail; a NIC that came with others of its GPU → the number of all these."""
    leaves: Mapping[str, Neighbour]
    """Adapter → the switch port at the other end."""
    planes: Mapping[str, int] = field(default_factory=dict)
    """Adapter → which plane of its rail it is."""

    def number(self, nic: str, port: str) -> int | None:
        """Tell the number of the rail that a NIC is on; None if it is on none."""
        return self.numbers.get(nic, self.numbers.get(port))


@dataclass(frozen=True, slots=True)
class Rail:
    """A NIC in a pod, with the pod's GPU that it serves."""

    nic: Nic
    port: str
    """The adapter: a VF's PF, or the device itself."""
    gpu: str
    """UUID; empty for none."""
    locality: Locality | None
    """Between the two."""


def paired(nics: Sequence[Nic], gpus: Sequence[str], place: Place) -> tuple[Rail, ...]:
    """Give each NIC the GPU that is nearest to it, the GPUs alike; sorted by rail and plane.

    A NIC of which it is not known how near it is to GPUs gets none.
    """
    distances = place.distances
    known = [nic for nic in nics if gpus and distances.is_known(gpus[0], distances.port(nic.device))]
    costs = [[len(nics) * distances.span(gpu, distances.port(nic.device)) for gpu in gpus] for nic in known]
    chosen = assign(costs, [range(len(nics))] * len(gpus)) if known else None
    gpu_of = {nic: gpus[i] for nic, i in zip(known, chosen or (), strict=True)}
    found = [
        Rail(nic, distances.port(nic.device), gpu, distances.distance(gpu, nic.device) if gpu else None)
        for nic, gpu in ((nic, gpu_of.get(nic, "")) for nic in nics)
    ]

    def order(rail: Rail) -> tuple[bool, int, int, str]:
        number = place.number(rail.nic.device, rail.port)
        return number is None, number or 0, place.planes.get(rail.port, 0), rail.nic.device

    return tuple(sorted(found, key=order))


def document(rails: Sequence[Rail], place: Place) -> dict[str, Any]:
    """Write rails.json."""
    return {"version": VERSION, "rails": [_rail(rail, place) for rail in rails]}


def _rail(rail: Rail, place: Place) -> dict[str, Any]:
    nic, network, rdma = rail.nic, rail.nic.network, rail.nic.rdma
    numa_node = place.distances.numa_node(nic.device)
    node = next((node for node in place.snapshot.numa_nodes if node.number == numa_node), None)
    leaf = place.leaves.get(rail.port)
    gpu = place.snapshot.gpu_by_uuid.get(rail.gpu)
    return {
        "rail": place.number(nic.device, rail.port),
        "plane": place.planes.get(rail.port),
        "locality": rail.locality.name if rail.locality is not None else None,
        "numaNode": numa_node if numa_node != NO_NUMA_NODE else None,
        "cpus": cpu_list(node.cpus) if node is not None else None,
        "rateGbps": _rate(rail.port, place.snapshot),
        "leafSwitch": leaf.system_name or leaf.chassis if leaf is not None else None,
        "leafPort": leaf.port if leaf is not None else None,
        "gpu": _gpu(gpu) if gpu is not None else None,
        "nic": {
            "pciAddress": nic.device,
            "pfPciAddress": rail.port,
            "resource": nic.resource_name or None,
            "interface": network.interface or None,
            "mac": network.mac or None,
            "addresses": list(network.addresses),
            "rdmaDevice": rdma.name if rdma is not None else None,
            "rdmaPort": rdma.port if rdma is not None else None,
            "gidIndex": rdma.gid_index if rdma is not None else None,
        },
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    """Name a GPU; one that only sysfs shows has no UUID."""
    return {"uuid": gpu.uuid if gpu.uuid != gpu.pci_address else None, "pciAddress": gpu.pci_address}


def _rate(port: str, snapshot: Snapshot) -> int | None:
    """Tell the rate of an adapter's port in Gbit/s, as its RDMA device says, else its interface."""
    pci = snapshot.by_address.get(port)
    if pci is None:
        return None
    rates = [rdma_port.rate_gbps for rdma in pci.rdma_devices for rdma_port in rdma.ports]
    speed = pci.netdev.speed_mbps if pci.netdev is not None else None
    return int(max(rates, default=0)) or (speed // 1000 if speed and speed > 0 else 0) or None


# ------------------------------------------------------------------------ for NCCL


def nccl_topology(rails: Sequence[Rail], gpus: Sequence[str], place: Place) -> str:
    """Write an NCCL topology file: NUMA nodes, and in them the GPUs and NICs, those of one switch below one.

    What it does not say (speeds, the links between GPUs), NCCL finds by itself.
    """
    nodes: dict[int, list[str]] = {}
    for number, devices in enumerate(_switches([*gpus, *(rail.nic.device for rail in rails)], place.distances)):
        found = dict.fromkeys(_pci(device, place.snapshot) for device in devices)
        lines = [f'<pci busid="{busid}" class="0x{pci_class:06x}"/>' for busid, pci_class in found]
        if len(devices) > 1:
            switch = f'busid="ffff:ff:{number:02x}.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16"'
            lines = [f"<pci {switch}>", *(f"  {line}" for line in lines), "</pci>"]
        nodes.setdefault(place.distances.numa_node(devices[0]), []).extend(f"    {line}" for line in lines)
    lines = ['<system version="1">']
    for numa_node, inside in sorted(nodes.items()):
        lines += [f"  <cpu {_cpu(numa_node, place.snapshot)}>", *inside, "  </cpu>"]
    return "\n".join((*lines, "</system>", ""))


def _switches(devices: Sequence[str], distances: Distances) -> list[list[str]]:
    """Group devices by what is near to each other."""
    found: list[list[str]] = []
    for device in devices:
        near = (mine for mine in found if any(distances.distance(device, other) <= Locality.PXB for other in mine))
        group = next(near, None)
        if group is None:
            found.append([device])
        else:
            group.append(device)
    return found


def _cpu(numa_node: int, snapshot: Snapshot) -> str:
    cpus = next((node.cpus for node in snapshot.numa_nodes if node.number == numa_node), ())
    mask = sum(1 << cpu for cpu in cpus)
    words = [f"{mask >> 32 * i & 0xFFFFFFFF:08x}" for i in range(max(cpus, default=0) // 32, -1, -1)]
    return f'numaid="{numa_node}"' + (f' affinity="{",".join(words)}"' if cpus else "")


def _pci(device: str, snapshot: Snapshot) -> tuple[str, int]:
    """Tell the address by which NCCL knows a device, and its class. It takes the functions of an adapter for one.

    (src/transport/net_ib, ncclIbGetPciPath, NCCL_IB_MERGE_VFS.)
    """
    gpu = snapshot.gpu_by_uuid.get(device)
    address = gpu.pci_address if gpu is not None else device
    pci = snapshot.by_address.get(address)
    pci_class = pci.pci_class if pci is not None else 0x030200 if gpu is not None else 0x020000
    return (address, pci_class) if gpu is not None else (f"{address[:-4]}00.0", pci_class)
