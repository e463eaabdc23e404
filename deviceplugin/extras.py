"""Device files besides RDMA and vfio that come with a granted device. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agent.config import Resource
from agent.model.device import PciDevice, Snapshot
from deviceplugin.selectors import alternative
from deviceplugin.unit import Unit

VHOST_NODES = ("/dev/vhost-net", "/dev/net/tun")


def extra_paths(resource: Resource, units: Sequence[Unit], snapshot: Snapshot) -> Iterator[str]:
    """List uio devices, vhost-vDPA devices, and vhost-net where the selector that took a device asks for it."""
    for unit in units:
        device = snapshot.by_address.get(unit.device)
        if device is None:
            continue
        if device.uio:
            yield f"/dev/{device.uio}"
        select = alternative(resource.nic.select if resource.kind == "rail" else resource.select, unit.alternative)
        if select.vdpa_type and device.vdpa is not None and device.vdpa.path:
            yield device.vdpa.path
        if select.need_vhost_net and snapshot.vhost_net:
            yield from VHOST_NODES


def host_paths(devices: Sequence[PciDevice]) -> Mapping[str, str]:
    """Tell which files the host has under another name: vfio groups where there is no IOMMU."""
    return {f"/dev/vfio/{d.iommu_group}": f"/dev/vfio/noiommu-{d.iommu_group}" for d in devices if d.noiommu}
