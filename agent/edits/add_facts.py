"""What ADD adds to a container's edits, when its devices are in the pod: variables, and files with its rails. Pure.

A container's edits name its RDMA devices in a variable for each library, see `agent.edits.build`. Which GID these
are to send with is known once their interfaces have addresses. It joins the edits if it has one index on all of them,
for the libraries take no more than one; else they are left to choose by themselves.

The files are rails.json, which docs/libraries.md describes (VERSION counts up when a key changes its meaning or goes),
and a topology file, which NCCL takes as NCCL_TOPO_FILE: where each GPU and NIC stands, for hosts whose sysfs does not
show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.edits.build import FILES
from agent.hardware.lldp import Neighbour
from agent.model.allocation import Attachment, NetworkData, network_data
from agent.model.device import NO_NUMA_NODE, Gpu, Snapshot, cpu_list
from agent.model.locality import Locality
from agent.placement import Distances
from agent.placement.nics import assign

GID_INDEXES: Mapping[str, str] = {
    "NCCL_IB_HCA": "NCCL_IB_GID_INDEX",
    "UCX_NET_DEVICES": "UCX_IB_GID_INDEX",
    "NVSHMEM_HCA_LIST": "NVSHMEM_IB_GID_INDEX",
    "MV2_IBA_HCA": "MV2_DEFAULT_GID_INDEX",
}
"""The variable that names RDMA devices → the one with the index of the GID that the library uses on each of them."""
SOCKET_IFNAME = {"NCCL_IB_HCA": "NCCL_SOCKET_IFNAME"}
"""The same for the interface by which processes find each other."""
NOTED = "rdma"
"""Key of a row's request: what was found out of its RDMA device in the pod."""


@dataclass(frozen=True, slots=True)
class RdmaFacts:
    """A device's RDMA device in its pod."""

    name: str
    is_roce: bool = False
    """It has a table of GIDs that can be seen, and needs one of them; InfiniBand does not."""
    port: int = 1
    gid_index: int | None = None
    gid: str = ""
    """The address that it stands for."""

    def document(self) -> dict[str, Any]:
        """Return all fields, as JSON holds them."""
        return {name: getattr(self, name) for name in RdmaFacts.__slots__}


@dataclass(frozen=True, slots=True)
class Nic:
    """A device as it is in its pod."""

    device: str
    """PCI address; of an interface that was made upon a device, that one's."""
    resource_name: str
    network: NetworkData
    rdma: RdmaFacts | None = None

    @classmethod
    def of(cls, row: Attachment, result: Mapping[str, Any] | None = None) -> Nic:
        """Make it of an attachment. `result` is what its ADD is to answer, if it has not yet."""
        noted = row.request.get(NOTED)
        network = network_data(row.result or result or {}, row.ifname)
        rdma = RdmaFacts(**noted) if noted else None
        return cls(row.parent, row.resource_name, network, rdma)


def added_edits(
    edits: Mapping[str, Any], nics: Sequence[Nic], socket_ifname: str = "", files: Mapping[str, str] | None = None
) -> tuple[Mapping[str, Any], list[str]]:
    """Work out what to add to containerEdits, by what is known of a pod's devices now; and say what is left out.

    `socket_ifname` is the pod's interface to everybody; `files` maps the variables of `FILES` to paths on the host.
    """
    asked = dict(_split(edits))
    env, left_out = list[str](), list[str]()
    for variable, index_variable in GID_INDEXES.items():
        index = _index(names_in(variable, asked[variable]), nics) if variable in asked else None
        if isinstance(index, int):
            env.append(f"{index_variable}={index}")
        elif index:
            left_out.append(f"{index_variable} is left out, for the library to choose: {index}")
    for variable, ifname_variable in SOCKET_IFNAME.items():
        if variable in asked and socket_ifname:
            env.append(f"{ifname_variable}=={socket_ifname}")
    options = ["ro", "bind", "nosuid", "nodev"]
    mounts = [
        {"hostPath": host_path, "containerPath": asked[variable], "options": options}
        for variable, host_path in (files or {}).items()
        if variable in asked
    ]
    found = {"env": env, "mounts": mounts}
    return {key: value for key, value in found.items() if value}, left_out


def wants_facts(edits: Mapping[str, Any]) -> bool:
    """Tell whether ADD may have something to add to some edits."""
    return any(variable in GID_INDEXES or variable in FILES for variable, _ in _split(edits))


def files_asked(edits: Mapping[str, Any]) -> frozenset[str]:
    """List the variables of some edits that name files."""
    return frozenset(variable for variable, _ in _split(edits) if variable in FILES)


def names_in(variable: str, value: str) -> tuple[str, ...]:
    """List the RDMA devices that a variable of `GID_INDEXES` names."""
    if variable == "MV2_IBA_HCA":
        return tuple(value.split(":"))
    return tuple(dict.fromkeys(part.partition(":")[0] for part in value.removeprefix("=").split(",")))


def _index(names: Sequence[str], nics: Sequence[Nic]) -> int | str | None:
    """Tell the index that some RDMA devices have in common, or why there is none; None if they need none."""
    mine = [nic.rdma for nic in nics if nic.rdma is not None and nic.rdma.name in names]
    indexes: dict[str, set[int | None]] = {}
    for rdma in mine:
        if rdma.is_roce:
            indexes.setdefault(rdma.name, set()).add(rdma.gid_index)
    if not indexes:
        return None
    needed = [name for name in names if name in indexes or name not in {rdma.name for rdma in mine}]
    unknown = [name for name in needed if None in indexes.get(name, {None})]
    if unknown:
        return f"{', '.join(unknown)} has no RoCE v2 GID that is known to be the pod's"
    different = {index for found in indexes.values() for index in found}
    if len(different) == 1:
        return different.pop()
    each = (f"{name}: {', '.join(map(str, found))}" for name, found in indexes.items())
    return f"it differs ({'; '.join(each)})"


def _split(edits: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for entry in edits.get("env", ()):
        name, _, value = entry.partition("=")
        yield name, value


VERSION = 1


@dataclass(frozen=True)
class NodeFacts:
    """The facts of the node that `rails.json` is built from."""

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


def paired(nics: Sequence[Nic], gpus: Sequence[str], node: NodeFacts) -> tuple[Rail, ...]:
    """Give each NIC the GPU that is nearest to it, the GPUs alike; sorted by rail and plane.

    A NIC of which it is not known how near it is to GPUs gets none.
    """
    distances = node.distances
    known = [nic for nic in nics if gpus and distances.is_known(gpus[0], distances.port(nic.device))]
    costs = [[len(nics) * distances.span(gpu, distances.port(nic.device)) for gpu in gpus] for nic in known]
    chosen = assign(costs, [range(len(nics))] * len(gpus)) if known else None
    gpu_of = {nic: gpus[i] for nic, i in zip(known, chosen or (), strict=True)}
    found = [
        Rail(nic, distances.port(nic.device), gpu, distances.distance(gpu, nic.device) if gpu else None)
        for nic, gpu in ((nic, gpu_of.get(nic, "")) for nic in nics)
    ]

    def order(rail: Rail) -> tuple[bool, int, int, str]:
        number = node.number(rail.nic.device, rail.port)
        return number is None, number or 0, node.planes.get(rail.port, 0), rail.nic.device

    return tuple(sorted(found, key=order))


def rails_document(rails: Sequence[Rail], node: NodeFacts) -> dict[str, Any]:
    """Write rails.json."""
    return {"version": VERSION, "rails": [_rail(rail, node) for rail in rails]}


def _rail(rail: Rail, node: NodeFacts) -> dict[str, Any]:
    nic, network, rdma = rail.nic, rail.nic.network, rail.nic.rdma
    numa_node = node.distances.numa_node(nic.device)
    numa = next((each for each in node.snapshot.numa_nodes if each.number == numa_node), None)
    leaf = node.leaves.get(rail.port)
    gpu = node.snapshot.gpu_by_uuid.get(rail.gpu)
    return {
        "rail": node.number(nic.device, rail.port),
        "plane": node.planes.get(rail.port),
        "locality": rail.locality.name if rail.locality is not None else None,
        "numaNode": numa_node if numa_node != NO_NUMA_NODE else None,
        "cpus": cpu_list(numa.cpus) if numa is not None else None,
        "rateGbps": _rate(rail.port, node.snapshot),
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


def nccl_topology(rails: Sequence[Rail], gpus: Sequence[str], node: NodeFacts) -> str:
    """Write an NCCL topology file: NUMA nodes, and in them the GPUs and NICs, those of one switch below one.

    What it does not say (speeds, the links between GPUs), NCCL finds by itself.
    """
    nodes: dict[int, list[str]] = {}
    for number, devices in enumerate(_switches([*gpus, *(rail.nic.device for rail in rails)], node.distances)):
        found = dict.fromkeys(_pci(device, node.snapshot) for device in devices)
        lines = [f'<pci busid="{busid}" class="0x{pci_class:06x}"/>' for busid, pci_class in found]
        if len(devices) > 1:
            switch = f'busid="ffff:ff:{number:02x}.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16"'
            lines = [f"<pci {switch}>", *(f"  {line}" for line in lines), "</pci>"]
        nodes.setdefault(node.distances.numa_node(devices[0]), []).extend(f"    {line}" for line in lines)
    lines = ['<system version="1">']
    for numa_node, inside in sorted(nodes.items()):
        lines += [f"  <cpu {_cpu(numa_node, node.snapshot)}>", *inside, "  </cpu>"]
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
