"""Granted units → what their container gets. Pure.

hca, vf and nic get character devices of exactly the devices granted, never of a neighbour: by CDI names of ours, or by
their paths where runtime or kubelet know no such names. A slot gets a CDI name, whose meaning is settled when the pod's
network is set up. A GPU is left to the NVIDIA container toolkit:
by CDI name where the node has its CDI spec, else by the variable that its runtime hook reads. A rail brings both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from agent.config import Resource
from agent.config.resources import TOLD_AT_ADD
from agent.edits.compat import build_compat
from agent.edits.container_edits import ContainerEdits, DeviceNode, joined
from agent.edits.environment import helper_variables, rdma_devices_of
from agent.edits.gpus import NO_GPU_FILES, GpuFiles, gpu_edits
from agent.errors import UnitUnhealthy
from agent.model.allocation import NO_SPECS, UnitSpec
from agent.model.device import PciDevice, RdmaDevice, Snapshot
from agent.model.unit_id import cdi_name
from agent.offer.gpu_units import nic_resource
from agent.offer.offer import Unit
from agent.offer.selectors import alternative

VHOST_NODES = ("/dev/vhost-net", "/dev/net/tun")
RDMA_CM = "/dev/infiniband/rdma_cm"
WHOLE = ("vf", "nic", "accelerator")
"""Kinds whose units are devices of their own, which programs find by PCI address."""


def build(
    resource: Resource,
    units: Sequence[Unit],
    snapshot: Snapshot,
    gpu_files: GpuFiles = NO_GPU_FILES,
    specs: Mapping[str, UnitSpec] = NO_SPECS,
) -> ContainerEdits:
    """Work out what a container gets for these units of one resource.

    `gpu_files` is what the host has to pass GPUs by; `specs` are the units that are named, by their CDI specs.
    Raises UnitUnhealthy for a unit whose device lacks what a container needs to use it.
    """
    if not units:
        return ContainerEdits()
    found = _build(resource, units, snapshot, gpu_files, specs)
    return replace(found, mounts=(*found.mounts, *resource.mounts)) if resource.mounts else found


def _build(
    resource: Resource,
    units: Sequence[Unit],
    snapshot: Snapshot,
    gpu_files: GpuFiles = NO_GPU_FILES,
    specs: Mapping[str, UnitSpec] = NO_SPECS,
) -> ContainerEdits:
    if resource.has_slots:
        return ContainerEdits(cdi_devices=tuple(cdi_name(resource.kind, unit.unit_id) for unit in units))
    if resource.compat is not None:
        return build_compat(resource, units, snapshot)
    if resource.kind == "gpu":
        return gpu_edits(resource.pass_by, units, snapshot, gpu_files)
    if resource.kind == "rail":
        of_gpus = gpu_edits(resource.pass_by, units, snapshot, gpu_files)
        nics = [part for unit in units for part in unit.parts]
        return joined(of_gpus, _build(nic_resource(resource), nics, snapshot, specs=specs))
    envs: tuple[tuple[str, str], ...] = ()
    if resource.kind in WHOLE:
        envs = ((pcidevice_name(resource.name), ",".join(u.device for u in units)),)
    if specs:
        return ContainerEdits(envs, cdi_devices=tuple(cdi_name(spec.kind, i) for i, spec in specs.items()))
    paths: dict[str, None] = {}
    for unit in units:
        device = snapshot.by_address.get(unit.device)
        if device is None:
            raise UnitUnhealthy(f"unit {unit.unit_id} of {resource.name}: {unit.device} is not on this node any more")
        for path in _paths(resource, unit, device):
            paths[path] = None
    paths |= dict.fromkeys(_extra_paths(resource, units, snapshot))
    if snapshot.rdma_cm and any("/uverbs" in path for path in paths):
        paths[RDMA_CM] = None
    words = [word for word in resource.environment if word not in TOLD_AT_ADD]
    envs += helper_variables(words, rdma_devices_of(units, snapshot))
    renamed = _host_paths([snapshot.by_address[unit.device] for unit in units])
    return ContainerEdits(envs, tuple(DeviceNode(path, host_path=renamed.get(path, "")) for path in paths))


def pcidevice_name(resource_name: str) -> str:
    """Name the well-known variable that lists PCI addresses: rdma/vf → PCIDEVICE_RDMA_VF."""
    return "PCIDEVICE_" + re.sub(r"[./-]", "_", resource_name).upper()


def _paths(resource: Resource, unit: Unit, device: PciDevice) -> Iterator[str]:
    if device.is_for_vfio:
        if device.iommu_group is None:
            raise UnitUnhealthy(
                f"unit {unit.unit_id} of {resource.name}: {device.address} is bound to {device.driver} but has no IOMMU"
                " group: enable the IOMMU in the firmware and on the kernel command line"
            )
        yield "/dev/vfio/vfio"
        yield f"/dev/vfio/{device.iommu_group}"
        return
    found = [r for r in device.rdma_devices if r.name in unit.rdma_devices]
    if resource.kind == "hca" and not any(r.char_device("uverbs") for r in found):
        raise UnitUnhealthy(
            f"unit {unit.unit_id} of {resource.name}: {device.address} has no /dev/infiniband/uverbs device:"
            " load the module ib_uverbs"
        )
    kinds = ("uverbs", "umad", "issm") if resource.management else ("uverbs",)
    yield from _char_devices(found, kinds)


def _char_devices(rdma_devices: Iterable[RdmaDevice], kinds: tuple[str, ...]) -> Iterator[str]:
    for rdma in rdma_devices:
        for kind in kinds:
            yield from (c.path for c in rdma.char_device(kind))


def _extra_paths(resource: Resource, units: Sequence[Unit], snapshot: Snapshot) -> Iterator[str]:
    """List uio, CXI and vhost-vDPA devices, and vhost-net where the selector that took a device asks for it."""
    for unit in units:
        device = snapshot.by_address.get(unit.device)
        if device is None:
            continue
        if device.uio:
            yield f"/dev/{device.uio}"
        if device.cxi and not device.is_for_programs:
            yield f"/dev/{device.cxi}"
        select = alternative(resource.nic.select if resource.kind == "rail" else resource.select, unit.alternative)
        if select.vdpa_type and device.vdpa is not None and device.vdpa.path:
            yield device.vdpa.path
        if select.need_vhost_net and snapshot.vhost_net:
            yield from VHOST_NODES


def _host_paths(devices: Sequence[PciDevice]) -> Mapping[str, str]:
    """Tell which files the host has under another name: vfio groups where there is no IOMMU."""
    return {f"/dev/vfio/{d.iommu_group}": f"/dev/vfio/noiommu-{d.iommu_group}" for d in devices if d.noiommu}
