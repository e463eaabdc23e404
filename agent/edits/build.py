"""Granted units → what their container gets. Pure, but for `GpuFilesOf`.

hca, vf and nic get character devices of exactly the devices granted, never of a neighbour: by CDI names of ours, or by
their paths where runtime or kubelet know no such names. A slot gets a CDI name, whose meaning is settled when the pod's
network is set up. In CDI specs each device, or unit, has containerEdits of its own: variables name all of the
container's devices of the resource, and stand alike in the edits of each; device nodes are those of the device itself.

A GPU is left to the NVIDIA container toolkit, which knows the files of the driver that a program needs. A container
names its GPUs in one of the ways that the toolkit understands, or several:

    cdi            names of the host's NVIDIA spec, resolved by the container runtime itself
    envvar         NVIDIA_VISIBLE_DEVICES, for hosts whose runtime is the toolkit's; a pod can forge it
    volume-mounts  a mount for each GPU below a folder that the toolkit looks into; a pod cannot forge it
    device-specs   besides one of these, the device files, so that kubelet's device cgroup knows of them

Without a choice it is CDI where the host's spec names the GPUs, else the variable. A rail brings both GPU and NIC.

Well-known variables name the RDMA devices for communication libraries. Without them a library tries every device in
/sys/class/infiniband, also those that the container has no character device for. What a value may look like:

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

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent.config import Resource
from agent.config.resources import TOLD_AT_ADD
from agent.edits.cdi import SPEC_FOLDERS, ContainerEdits, DeviceNode, SpecNames, device_of, vfio_nodes
from agent.edits.compat import build_compat
from agent.errors import UnitUnhealthy
from agent.hardware.nvml.library import device_nodes, mig_minors
from agent.model.allocation import NO_SPECS, Spec
from agent.model.device import Gpu, MigDevice, RdmaDevice, Snapshot
from agent.model.mounts import Mount
from agent.model.unit_id import cdi_name
from agent.offer.offer import Unit
from agent.offer.selection import alternative
from agent.offer.units import nic_resource

VHOST_NODES = ("/dev/vhost-net", "/dev/net/tun")
RDMA_CM = "/dev/infiniband/rdma_cm"
WHOLE = ("vf", "nic", "accelerator")
"""Kinds whose units are devices of their own, which programs find by PCI address."""

Pairs = tuple[tuple[str, str], ...]
FILES: Mapping[str, str] = MappingProxyType(
    {"NODEFABRIC_RAILS": "/run/nodefabric/rails.json", "NCCL_TOPO_FILE": "/run/nodefabric/nccl-topology.xml"}
)
"""Variables that say where a container finds a file. ADD writes it, see `agent.edits.add_facts`."""

CDI_KIND = "nvidia.com/gpu"
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
MOUNTS = "/var/run/nvidia-container-devices"
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


@dataclass(frozen=True, slots=True)
class GpuFiles:
    """What the host has to pass GPUs by."""

    cdi_names: frozenset[str] = frozenset()
    """Names of the devices of its NVIDIA CDI specs: `0`, `GPU-…`, `0:1`, `all`, as the toolkit was told."""
    nodes: frozenset[str] = frozenset()
    """The driver's device files."""
    mig_minors: Mapping[str, int] = field(default_factory=dict)
    """What a slice's files are: `gpu0/gi7/access` → minor number in nvidia-caps."""


NO_GPU_FILES = GpuFiles()


def build(
    resource: Resource,
    units: Sequence[Unit],
    snapshot: Snapshot,
    gpu_files: GpuFiles = NO_GPU_FILES,
    specs: Mapping[str, Spec] = NO_SPECS,
) -> ContainerEdits:
    """Work out what a container gets for these units of one resource.

    `gpu_files` is what the host has to pass GPUs by; `specs` are the units that are named, by their CDI specs.
    Raises UnitUnhealthy for a unit whose device lacks what a container needs to use it.
    """
    if not units:
        return ContainerEdits()
    if resource.has_slots:
        found = ContainerEdits(cdi_devices=tuple(cdi_name(resource.kind, unit.unit_id) for unit in units))
    elif resource.compat is not None:
        found = build_compat(resource, units, snapshot)
    elif resource.kind == "gpu":
        found = gpu_edits(resource.pass_by, units, snapshot, gpu_files)
    elif resource.kind == "rail":
        nics = [part for unit in units for part in unit.parts]
        found = gpu_edits(resource.pass_by, units, snapshot, gpu_files)
        found += _edits_of_nics(nic_resource(resource), nics, snapshot, specs)
    else:
        found = _edits_of_nics(resource, units, snapshot, specs)
    return replace(found, mounts=(*found.mounts, *resource.mounts)) if resource.mounts else found


def _edits_of_nics(
    resource: Resource, units: Sequence[Unit], snapshot: Snapshot, specs: Mapping[str, Spec]
) -> ContainerEdits:
    envs: tuple[tuple[str, str], ...] = ()
    if resource.kind in WHOLE:
        envs = ((pcidevice_name(resource.name), ",".join(u.device for u in units)),)
    if specs:
        return ContainerEdits(envs, cdi_devices=tuple(cdi_name(spec.kind, i) for i, spec in specs.items()))
    nodes = {node.path: node for unit in units for node in _nodes_of(resource, unit, snapshot)}
    if snapshot.rdma_cm and any("/uverbs" in path for path in nodes):
        nodes[RDMA_CM] = DeviceNode(RDMA_CM)
    words = [word for word in resource.environment if word not in TOLD_AT_ADD]
    envs += helper_variables(words, rdma_devices_of(units, snapshot))
    return ContainerEdits(envs, tuple(nodes.values()))


def pcidevice_name(resource_name: str) -> str:
    """Name the well-known variable that lists PCI addresses: rdma/vf → PCIDEVICE_RDMA_VF."""
    return "PCIDEVICE_" + re.sub(r"[./-]", "_", resource_name).upper()


def _nodes_of(resource: Resource, unit: Unit, snapshot: Snapshot) -> Iterator[DeviceNode]:
    """List the files of a unit's device, and vhost-net where the selector that took it asks for it."""
    device = device_of(unit, snapshot)
    if device.is_for_vfio:
        yield from vfio_nodes(unit, device)
    else:
        found = [r for r in device.rdma_devices if r.name in unit.rdma_devices]
        if resource.kind == "hca" and not any(r.char_device("uverbs") for r in found):
            raise UnitUnhealthy(
                f"unit {unit.unit_id} of {resource.name}: {device.address} has no /dev/infiniband/uverbs device:"
                " load the module ib_uverbs"
            )
        kinds = ("uverbs", "umad", "issm") if resource.management else ("uverbs",)
        yield from (DeviceNode(file.path) for rdma in found for kind in kinds for file in rdma.char_device(kind))
    if device.uio:
        yield DeviceNode(f"/dev/{device.uio}")
    if device.cxi and not device.is_for_programs:
        yield DeviceNode(f"/dev/{device.cxi}")
    select = alternative(resource.nic.select if resource.kind == "rail" else resource.select, unit.alternative)
    if select.vdpa_type and device.vdpa is not None and device.vdpa.path:
        yield DeviceNode(device.vdpa.path)
    if select.need_vhost_net and snapshot.vhost_net:
        yield from map(DeviceNode, VHOST_NODES)


def edits_by_device(
    resource: Resource, units: Sequence[Unit], snapshot: Snapshot, variables: Sequence[tuple[str, str]] = ()
) -> Mapping[str, Mapping[str, Any]]:
    """Work out the edits for each of the devices that one container has of a resource: PCI address → edits.

    `variables` are helpers for libraries that speak of the whole container. Raises UnitUnhealthy.
    """
    early = replace(resource, binding="early", environment=())
    whole = build(early, units, snapshot)
    env = [f"{name}={value}" for name, value in (*whole.envs, *variables)]
    found: dict[str, Mapping[str, Any]] = {}
    for unit in units:
        own = build(early, [unit], snapshot)
        nodes = [_node(node) for node in own.devices]
        found[unit.device] = {"env": env, **({"deviceNodes": nodes} if nodes else {})}
    return found


def unit_specs(resource: Resource, units: Sequence[Unit], snapshot: Snapshot) -> Mapping[str, Spec]:
    """Work out what the CDI specs say of the units that one container has of a resource: unit ID → spec.

    None has one whose container gets no file, or exactly what another project's plugin gives. Of a rail it tells the
    NICs: GPUs have names of their own. Addresses are told only where a unit is not called by its own: those that
    kubelet was answered hold else. Raises UnitUnhealthy.
    """
    if resource.compat is not None or resource.kind == "gpu":
        return NO_SPECS
    of_nics = nic_resource(resource) if resource.kind == "rail" else resource
    parts = [part for unit in units for part in unit.parts]
    variables = helper_variables(words_here(of_nics, snapshot), rdma_devices_of(parts, snapshot))
    found = edits_by_device(of_nics, parts, snapshot, variables)
    beside = tuple(unit.unit_id for unit in units)
    if all(unit.unit_id == unit.device for unit in units):
        found = {
            device: {**edits, "env": [f"{name}={value}" for name, value in variables]}
            for device, edits in found.items()
        }
    specs = {unit.unit_id: _spec(resource.kind, beside, unit, found) for unit in units}
    return {unit_id: spec for unit_id, spec in specs.items() if spec.edits.get("deviceNodes")}


def _spec(kind: str, beside: tuple[str, ...], unit: Unit, found: Mapping[str, Mapping[str, Any]]) -> Spec:
    """Say the spec of a unit, by the edits of its devices, whose variables are alike."""
    spec = Spec(kind, found[unit.device], beside=beside)
    for device in unit.devices if unit.further else ():
        spec = spec.with_nodes(device, found[device].get("deviceNodes", ()))
    return spec


def _node(node: DeviceNode) -> Mapping[str, str]:
    found = {"path": node.path, "permissions": node.permissions}
    return {**found, "hostPath": node.host_path} if node.host_path else found


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


def gpu_edits(pass_by: Sequence[str], units: Sequence[Unit], snapshot: Snapshot, files: GpuFiles) -> ContainerEdits:
    """Work out what a container gets for these units, which are GPUs, slices or replicas of them."""
    found = [_found(unit.gpu or unit.device, snapshot) for unit in units]
    ids = list(dict.fromkeys(unit.gpu or unit.device for unit in units))  # replicas of one GPU are one
    names = list(dict.fromkeys(_cdi_name(*each, files.cdi_names) for each in found))
    by = pass_by or (("cdi",) if all(name in files.cdi_names for name in names) else ("envvar",))
    envs: dict[str, str] = {}
    if "envvar" in by:
        envs[VARIABLE] = ",".join(ids)
    if "volume-mounts" in by:
        envs[VARIABLE] = MOUNTS
    nodes = dict.fromkeys(path for each in found for path in _nodes(*each, files)) if "device-specs" in by else {}
    return ContainerEdits(
        envs=tuple(envs.items()),
        devices=tuple(DeviceNode(path) for path in nodes),
        cdi_devices=tuple(f"{CDI_KIND}={name}" for name in names) if "cdi" in by else (),
        mounts=tuple(Mount("/dev/null", f"{MOUNTS}/{i}") for i in ids) if "volume-mounts" in by else (),
    )


Found = tuple[str, Gpu | None, MigDevice | None]


def _found(uuid: str, snapshot: Snapshot) -> Found:
    """Find what a UUID names. It may be gone: what a container asks for by name can come back."""
    gpu = snapshot.gpu_by_uuid.get(uuid)
    if gpu is not None:
        return uuid, gpu, None
    for gpu in snapshot.gpus:
        for mig in gpu.mig_devices:
            if mig.uuid == uuid:
                return uuid, gpu, mig
    return uuid, None, None


def _cdi_name(uuid: str, gpu: Gpu | None, mig: MigDevice | None, names: frozenset[str]) -> str:
    """Choose the name that the host's spec has for a GPU: its UUID, which stays, before a number, which may not."""
    if uuid in names or gpu is None:
        return uuid
    number = f"{gpu.index}:{mig.index}" if mig is not None else f"{gpu.index}"
    return number if number in names else uuid


def _nodes(uuid: str, gpu: Gpu | None, mig: MigDevice | None, files: GpuFiles) -> Iterator[str]:
    if gpu is None or gpu.minor is None:
        return
    yield from (path for path in CONTROL_NODES if path in files.nodes)
    yield f"/dev/nvidia{gpu.minor}"
    if mig is not None:
        instance = f"gpu{gpu.minor}/gi{mig.gpu_instance}"
        for path in (f"{instance}/access", f"{instance}/ci{mig.compute_instance}/access"):
            if path in files.mig_minors:
                yield f"/dev/nvidia-caps/nvidia-cap{files.mig_minors[path]}"


class GpuFilesOf:
    """One host's, below a root. Not for two threads at once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._specs = SpecNames([root / folder.relative_to("/") for folder in SPEC_FOLDERS])

    def read(self) -> GpuFiles:
        """Read the host's CDI specs, device files and slices. A few file operations, unless a spec is new."""
        return GpuFiles(self._specs.of_kind(CDI_KIND), device_nodes(self._root), mig_minors(self._root))
