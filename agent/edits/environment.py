"""Well-known variables that tell communication libraries which RDMA devices a container may use. Pure.

Without them a library tries every device that it finds in /sys/class/infiniband, also those that the container has no
character device for. What a value may look like:

- NCCL_IB_HCA: `=` asks for exact names, so that mlx5_1 is not mlx5_10 as well
  (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html); RCCL reads the same.
- UCX_NET_DEVICES: device:port pairs (https://openucx.readthedocs.io, ucx_info -f).
- NVSHMEM_HCA_LIST: device:port pairs, heeded if NVSHMEM_ENABLE_NIC_PE_MAPPING is 1
  (https://docs.nvidia.com/nvshmem/api/gen/env.html).
- MV2_IBA_HCA: names with colons between them (MVAPICH2 user guide).

kubelet merges the answers for a container's resources, and where two set one variable it keeps either. So a word
stands at one early-bound resource of a configuration only (`agent.config.document`); for late-bound ones the whole
container is known, and all of them say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from agent.config import Resource
from agent.model.device import RdmaDevice, Snapshot
from agent.offer.offer import Unit

Pairs = tuple[tuple[str, str], ...]
FILES: Mapping[str, str] = MappingProxyType(
    {"NODEFABRIC_RAILS": "/run/nodefabric/rails.json", "NCCL_TOPO_FILE": "/run/nodefabric/nccl-topology.xml"}
)
"""Variables that say where a container finds a file. ADD writes it, see `agent.edits.told`."""


def helper_variables(words: Iterable[str], rdma_devices: Sequence[RdmaDevice]) -> Pairs:
    """Spell out the variables that `words` (nccl, ucx …) stand for; but for files, none if there is no RDMA device."""
    files: Mapping[str, Pairs] = {
        word: ((variable, FILES[variable]),)
        for word, variable in (("rails", "NODEFABRIC_RAILS"), ("ncclTopo", "NCCL_TOPO_FILE"))
    }
    if not rdma_devices:
        return tuple(pair for word in words for pair in files.get(word, ()))
    names = [rdma.name for rdma in rdma_devices]
    ports = ",".join(f"{rdma.name}:{number}" for rdma in rdma_devices for number in _ports(rdma))
    known: Mapping[str, Pairs] = {
        "nccl": (("NCCL_IB_HCA", "=" + ",".join(names)),),
        "ucx": (("UCX_NET_DEVICES", ports),),
        "nvshmem": (("NVSHMEM_HCA_LIST", ports), ("NVSHMEM_ENABLE_NIC_PE_MAPPING", "1")),
        "mvapich2": (("MV2_IBA_HCA", ":".join(names)),),
        **files,
    }
    return tuple(pair for word in words for pair in known[word])


def words_here(resource: Resource, snapshot: Snapshot) -> Iterable[str]:
    """List the words of a resource that have a meaning on this node.

    NCCL knows Data Direct functions by itself, and a topology file would put adapters where their PFs are.
    """
    hides = snapshot.data_direct.is_here
    return (word for word in resource.environment if not (hides and word == "ncclTopo"))


def variables_of_container(held: Sequence[tuple[Resource, Sequence[Unit]]], snapshot: Snapshot) -> Pairs:
    """Work out the variables of a container from all that it holds, resource by resource.

    A variable names the devices of every resource that asks for it.
    """
    words = dict.fromkeys(word for resource, _ in held for word in words_here(resource, snapshot))
    found: list[tuple[str, str]] = []
    for word in words:
        units = [unit for resource, mine in held if word in resource.environment for unit in mine]
        found += helper_variables([word], rdma_devices_of(units, snapshot))
    return tuple(found)


def rdma_devices_of(units: Iterable[Unit], snapshot: Snapshot) -> tuple[RdmaDevice, ...]:
    """List the RDMA devices behind units, each once, in the order of the units."""
    found: dict[str, RdmaDevice] = {}
    for unit in units:
        device = snapshot.by_address.get(unit.device)
        for rdma in device.rdma_devices if device is not None else ():
            if rdma.name in unit.rdma_devices:
                found[rdma.name] = rdma
    return tuple(found.values())


def _ports(rdma: RdmaDevice) -> Sequence[int]:
    """List a device's ports. Of one that is in a pod nothing is known but its name; most have one."""
    return [port.number for port in rdma.ports] or [1]
