"""What containers get from pools of another project's configuration: exactly what its device plugin gives.

sriov-network-device-plugin tells a device's facts by *providers*, which decide the variable `…_INFO` and the device
files alike: generic, vfio, uio, rdma, vdpa, vhost, extra. k8s-rdma-shared-dev-plugin gives every container the
character devices of all adapters of its pool. With CDI, both give an annotation in place of the device files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agent.config import Resource, SharedPool, SriovPool
from agent.edits.cdi import ContainerEdits, DeviceNode, device_of, text_of, vfio_nodes
from agent.edits.specs import POOL
from agent.errors import UnitUnhealthy
from agent.model.device import PciDevice, RdmaDevice, Snapshot
from agent.offer.offer import Unit
from agent.offer.selection import alternative

RDMA_CM = "/dev/infiniband/rdma_cm"
CHAR_DEVICE_KINDS = ("issm", "umad", "uverbs")
"""In the order in which Mellanox/rdmamap lists them, before rdma_cm."""
SHARED_CDI_KIND = "nvidia.com/net-rdma"
_CDI_NAMES = {"netDevice": "net-pci", "accelerator": "net-accel"}

VARIABLE = "NODEFABRIC_DEVICE"

Info = dict[str, dict[str, str]]

log = logging.getLogger(__name__)


def build_compat(resource: Resource, units: Sequence[Unit], snapshot: Snapshot) -> ContainerEdits:
    """Work out what a container gets. Raises UnitUnhealthy for a device that is gone, or has no IOMMU group."""
    if isinstance(resource.compat, SharedPool):
        return _of_shared_pool(resource.compat, units, snapshot)
    assert isinstance(resource.compat, SriovPool)
    return _of_sriov_pool(resource, resource.compat, units, snapshot)


def sriov_cdi_kind(pool: SriovPool) -> str:
    """Name the CDI kind of a pool: intel.com/net-pci."""
    return f"{pool.prefix}/{_CDI_NAMES[pool.device_type]}"


def shared_nodes(rdma_devices: Iterable[RdmaDevice], snapshot: Snapshot) -> tuple[DeviceNode, ...]:
    """List the device files of a shared pool's adapters."""
    return tuple(DeviceNode(path, "rwm") for path in _char_paths(rdma_devices, snapshot))


def envs_name(resource_name: str) -> str:
    """Name the variable of a pool as the plugin does, hyphens kept: intel.com/vf-a → PCIDEVICE_INTEL_COM_VF-A."""
    return "PCIDEVICE_" + resource_name.replace("/", "_").replace(".", "_").upper()


def go_marshal(value: Mapping[str, object]) -> str:
    """Write JSON as Go's encoding/json does: keys sorted, no spaces, and nothing that HTML could mistake for a tag."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _of_sriov_pool(resource: Resource, pool: SriovPool, units: Sequence[Unit], snapshot: Snapshot) -> ContainerEdits:
    infos: dict[str, Info] = {}
    nodes: dict[str, DeviceNode] = {}
    for unit in units:
        infos[unit.device], found = _facts(resource, unit, snapshot)
        for node in found:
            nodes.setdefault(node.host_path or node.path, node)
    listed, told = ",".join(infos), go_marshal(infos)
    name = envs_name(resource.name)
    names = dict.fromkeys((name, name.replace("-", "_")))  # no shell can ask for a name with a hyphen
    envs = tuple(pair for each in names for pair in ((each, listed), (f"{each}_INFO", told)))
    if pool.use_cdi:
        return _with_cdi(envs, sriov_cdi_kind(pool), tuple(infos))
    return ContainerEdits(envs=envs, devices=tuple(nodes.values()))


def _of_shared_pool(pool: SharedPool, units: Sequence[Unit], snapshot: Snapshot) -> ContainerEdits:
    wanted = {name for unit in units for name in unit.rdma_devices}
    owners = {r.name: (d, r) for d in snapshot.devices for r in d.rdma_devices if r.name in wanted}
    if pool.use_cdi:
        return _with_cdi((), SHARED_CDI_KIND, dict.fromkeys(owners[name][0].address for name in sorted(owners)))
    return ContainerEdits(devices=shared_nodes((owners[name][1] for name in sorted(owners)), snapshot))


def _with_cdi(envs: tuple[tuple[str, str], ...], kind: str, addresses: Iterable[str]) -> ContainerEdits:
    names = tuple(f"{kind}={address}" for address in addresses)
    annotation = (f"cdi.k8s.io/{kind.replace('/', '_')}", ",".join(names))
    return ContainerEdits(envs=envs, cdi_devices=names, annotations=(annotation,))


def _facts(resource: Resource, unit: Unit, snapshot: Snapshot) -> tuple[Info, tuple[DeviceNode, ...]]:
    """Work out a device's providers and its files."""
    assert isinstance(resource.compat, SriovPool)
    device = device_of(unit, snapshot)
    info: Info = {"generic": {"deviceID": unit.device}}
    nodes: list[DeviceNode] = []
    if device.is_for_vfio:
        nodes += vfio_nodes(unit, device)
        info["vfio"] = {"mount": nodes[0].path, "dev-mount": nodes[1].path}
    elif device.uio:
        nodes.append(DeviceNode(f"/dev/{device.uio}"))
        info["uio"] = {"mount": nodes[0].path}
    select = alternative(resource.select, unit.alternative)
    if select.vdpa_type:
        path = device.vdpa.path if device.vdpa is not None else ""
        info["vdpa"] = {"mount": path} if path else {}
        nodes += [DeviceNode(path)] if path else []
    elif select.is_rdma and device.rdma_devices:
        info["rdma"] = _rdma(device, snapshot)
        nodes += [DeviceNode(path) for path in _char_paths(device.rdma_devices, snapshot)]
    if select.need_vhost_net and snapshot.vhost_net:
        info["vhost"] = {"net-mount": "/dev/vhost-net", "tun-mount": "/dev/net/tun"}
        nodes += [DeviceNode("/dev/vhost-net"), DeviceNode("/dev/net/tun")]
    extra = resource.compat.additional_info
    if extra is not None:
        info["extra"] = {**extra.get("*", {}), **extra.get(unit.device, {})}
    return info, tuple(nodes)


def _rdma(device: PciDevice, snapshot: Snapshot) -> dict[str, str]:
    found = {c.kind: c.path for r in device.rdma_devices for c in r.char_devices}
    if snapshot.rdma_cm:
        found["rdma_cm"] = RDMA_CM
    return found | {"rdma_dev": ",".join(r.name for r in device.rdma_devices)}


def _char_paths(rdma_devices: Iterable[RdmaDevice], snapshot: Snapshot) -> tuple[str, ...]:
    paths = [c.path for r in rdma_devices for kind in CHAR_DEVICE_KINDS for c in r.char_device(kind)]
    return (*paths, *([RDMA_CM] if snapshot.rdma_cm and paths else []))


def pool_specs(
    resources: Sequence[Resource], units: Mapping[str, Sequence[Unit]], snapshot: Snapshot
) -> Mapping[str, str]:
    """Write out the CDI specs that pools need which hand their devices out by CDI (--use-cdi): name → text.

    One file for each kind, since a name may be defined once only, and two shared pools may have an adapter in common. A
    device without edits would void the whole file (CDI's SPEC.md, containerEdits), so each has at least a variable.
    """
    kinds: dict[str, dict[str, Sequence[DeviceNode]]] = {}
    for resource in resources:
        pool = resource.compat
        if pool is not None and pool.use_cdi:
            kind = sriov_cdi_kind(pool) if isinstance(pool, SriovPool) else SHARED_CDI_KIND
            kinds.setdefault(kind, {}).update(_devices(resource, units.get(resource.name, ()), snapshot))
    return {
        f"{POOL}{kind.replace('/', '_')}": text_of(kind, [(name, _edits(name, nodes)) for name, nodes in sorted(found)])
        for kind, devices in kinds.items()
        if (found := devices.items())
    }


def _devices(
    resource: Resource, units: Sequence[Unit], snapshot: Snapshot
) -> Iterator[tuple[str, Sequence[DeviceNode]]]:
    if isinstance(resource.compat, SharedPool):
        names = {name for unit in units[:1] for name in unit.rdma_devices}
        for device in snapshot.devices:
            mine = [rdma for rdma in device.rdma_devices if rdma.name in names]
            if mine:
                yield device.address, shared_nodes(mine, snapshot)
        return
    for unit in units:
        try:
            yield unit.device, _facts(resource, unit, snapshot)[1]
        except UnitUnhealthy as error:
            log.debug("no CDI name: %s", error)


def _edits(name: str, nodes: Sequence[DeviceNode]) -> dict[str, Any]:
    edits: dict[str, Any] = {"env": [f"{VARIABLE}={name}"]}
    if nodes:
        edits["deviceNodes"] = [
            {"path": node.path, "hostPath": node.host_path or node.path, "permissions": node.permissions}
            for node in nodes
        ]
    return edits
