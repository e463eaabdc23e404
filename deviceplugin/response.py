"""Granted units → what their container gets. Pure.

hca, vf and nic get character devices of exactly the devices granted, never of a neighbour; a slot gets a CDI
name, whose meaning is settled when the pod's network is set up. A GPU is left to the NVIDIA container toolkit:
by CDI name where the node has its CDI spec, else by the variable that its runtime hook reads. A rail brings both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from agent.config import Resource
from agent.errors import UnitUnhealthy
from agent.model.device import PciDevice, RdmaDevice, Snapshot
from agent.model.slots import cdi_name
from deviceplugin.compat_response import build_compat
from deviceplugin.environment import helper_variables, rdma_devices_of
from deviceplugin.extras import extra_paths, host_paths
from deviceplugin.gpu_response import NO_GPU_FILES, GpuFiles, gpu_grants
from deviceplugin.grants import DeviceNode, Grants, joined
from deviceplugin.rails import nic_resource
from deviceplugin.resources import Unit

RDMA_CM = "/dev/infiniband/rdma_cm"
WHOLE = ("vf", "nic")
"""Kinds whose units are devices of their own, which programs find by PCI address."""


def build(resource: Resource, units: Sequence[Unit], snapshot: Snapshot, gpu_files: GpuFiles = NO_GPU_FILES) -> Grants:
    """Work out what a container gets for these units of one resource.

    `gpu_files` is what the host has to pass GPUs by.
    Raises UnitUnhealthy for a unit whose device lacks what a container needs to use it.
    """
    if not units:
        return Grants()
    if resource.binding == "late":
        return Grants(cdi_devices=tuple(cdi_name(resource.kind, unit.unit_id) for unit in units))
    if resource.compat is not None:
        return build_compat(resource, units, snapshot)
    if resource.kind == "gpu":
        return gpu_grants(resource.pass_by, units, snapshot, gpu_files)
    if resource.kind == "rail":
        of_gpus = gpu_grants(resource.pass_by, units, snapshot, gpu_files)
        return joined(of_gpus, build(nic_resource(resource), units, snapshot))
    paths: dict[str, None] = {}
    for unit in units:
        device = snapshot.by_address.get(unit.device)
        if device is None:
            raise UnitUnhealthy(f"unit {unit.unit_id} of {resource.name}: {unit.device} is not on this node any more")
        for path in _paths(resource, unit, device):
            paths[path] = None
    paths |= dict.fromkeys(extra_paths(resource, units, snapshot))
    if snapshot.rdma_cm and any("/uverbs" in path for path in paths):
        paths[RDMA_CM] = None
    envs: tuple[tuple[str, str], ...] = ()
    if resource.kind in WHOLE:
        envs = ((pcidevice_name(resource.name), ",".join(u.device for u in units)),)
    envs += helper_variables(resource.environment, rdma_devices_of(units, snapshot))
    renamed = host_paths([snapshot.by_address[unit.device] for unit in units])
    return Grants(envs, tuple(DeviceNode(path, host_path=renamed.get(path, "")) for path in paths))


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
