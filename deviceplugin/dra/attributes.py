"""What a ResourceSlice says of a device, by which claims choose: stable facts, never a link's state or a counter. Pure.

Names without a domain are the driver's own. Values are of the API's form, such as `{"string": "vf"}`; what is not
known, or does not fit, is left out.

An interface and an RDMA device leave the host with their pod, a driver is loaded again, a link that is down shows no
speed. What is published of a device must not follow: each change is a write for the whole cluster. So a fact of a
device stays until another one is read, and a device that is gone stays as long as it is offered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from agent.config import Dra, Resource
from agent.hardware.lldp import Neighbour
from agent.model.device import NO_NUMA_NODE, Gpu, LinkLayer, PciDevice, RdmaDevice, Snapshot, is_pci_address
from agent.model.fields import at, objects_at
from agent.offer.offer import Offer, Unit
from agent.placement import Distances


@dataclass(frozen=True)
class StableFacts:
    """The node as it was seen so far."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    """Devices as they are when nobody has them, gone ones too that are still offered; GPUs that are on the bus."""
    speeds: Mapping[str, int] = field(default_factory=dict)
    """Adapter → the highest speed of its ports, Gbit/s."""
    subnets: Mapping[str, str] = field(default_factory=dict)
    """InfiniBand adapter → the prefix of the subnet that its first port was in last."""
    rails: Mapping[str, int] = field(default_factory=dict)
    """Adapter → the number of its rail."""
    planes: Mapping[str, int] = field(default_factory=dict)
    """Adapter → which plane of its rail it is."""

    @cached_property
    def distances(self) -> Distances:
        """How near everything is, or was."""
        return Distances(self.snapshot)


def stable_facts(offer: Offer, before: StableFacts) -> StableFacts:
    """Add what an offer's snapshot shows to what was seen before. Returns `before` itself if that is nothing new."""
    now, known = offer.snapshot, before.snapshot.by_address
    devices = {device.address: _whole(device, known.get(device.address)) for device in now.devices}
    for address in {unit.device for units in offer.claimable.values() for unit in units} - devices.keys():
        gone = known.get(address)
        for one in (gone, known.get(gone.physfn or "") if gone is not None else None):
            if one is not None:
                devices.setdefault(one.address, one)
    snapshot = Snapshot(
        devices=tuple(sorted(devices.values(), key=lambda device: device.address)),
        gpus=_gpus(now, before.snapshot),
        accelerators=now.accelerators,
        places=now.places,
        adapter_ids=now.adapter_ids,
        gpu_ids=now.gpu_ids,
        numa_nodes=now.numa_nodes,
    )
    speeds = {d.address: max(_speed(d), before.speeds.get(d.address, 0)) for d in snapshot.devices if not d.is_vf}
    speeds = {address: speed for address, speed in speeds.items() if speed}
    subnets = {d.address: _subnet(d) or before.subnets.get(d.address, "") for d in snapshot.devices if not d.is_vf}
    subnets = {address: subnet for address, subnet in subnets.items() if subnet}
    seen = StableFacts(snapshot, speeds, subnets, offer.rail_of, offer.plane_of)
    return before if seen == before else seen


def _whole(device: PciDevice, before: PciDevice | None) -> PciDevice:
    """Fill in what has left the host. Another device may have come to the address."""
    if before is None or (device.vendor, device.device) != (before.vendor, before.device):
        return device
    is_away = not device.rdma_devices or all(rdma.absent for rdma in device.rdma_devices)
    if device.driver and device.netdevs and not is_away:
        return device
    whole = replace(
        device,
        driver=device.driver or before.driver,
        netdevs=device.netdevs or before.netdevs,
        rdma_devices=before.rdma_devices if is_away and before.rdma_devices else device.rdma_devices,
    )
    return before if whole == before else whole


def _gpus(now: Snapshot, before: Snapshot) -> tuple[Gpu, ...]:
    """List the GPUs; those that the driver does not tell of now, as while it is replaced, as long as they are there."""
    told = {gpu.pci_address for gpu in now.gpus}
    silent = [gpu for gpu in before.gpus if gpu.pci_address not in told and gpu.pci_address in now.by_address]
    if not silent:
        return now.gpus
    return tuple(sorted((*now.gpus, *silent), key=lambda gpu: (gpu.index, gpu.uuid)))


def _subnet(device: PciDevice) -> str:
    """Tell the subnet that the first port of a device is in; empty while it is not up, or has none."""
    return next((port.subnet_prefix for rdma in device.rdma_devices for port in rdma.ports), "")


def _speed(device: PciDevice) -> int:
    return max(_speeds(device), default=0)


def _speeds(device: PciDevice) -> Iterator[int]:
    """List what the ports say that are up; others tell what they could agree on last, or nothing."""
    own = device.netdev
    if own is not None and own.carrier and own.speed_mbps and own.speed_mbps > 0:
        yield own.speed_mbps // 1000
    for rdma in device.rdma_devices:
        yield from (int(port.rate_gbps) for port in rdma.ports if port.state == "ACTIVE")


def link_layer(device: PciDevice) -> str:
    """Name the link layer of an adapter, as its ports or its interface say; empty if neither does."""
    layers = [port.link_layer for rdma in device.rdma_devices for port in rdma.ports]
    layers += [device.netdev.link_layer] if device.netdev is not None else []
    return next((layer.value for layer in layers if layer is not LinkLayer.UNSPECIFIED), "")


STANDARD = "resource.kubernetes.io"
MULTUS = "k8s.cni.cncf.io"
UUID, BUS_ID = "uuid", "pciBusID"
"""What attributes that name a GPU are called, behind the domain."""
MAX_TEXT = 64
"""Bytes of a string, and of a version."""
OWN_ALONE = frozenset({"vf", f"{STANDARD}/pciBusID", f"{MULTUS}/deviceID"})
"""Attributes that tell one device from the others of its place."""

Attributes = Mapping[str, Mapping[str, Any]]

# semver.org 2.0.0, as the API server reads it.
_NUMBER, _PRE, _BUILD = r"(?:0|[1-9]\d*)", r"(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)", r"[0-9a-zA-Z-]+"
_VERSION = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-{_PRE}(?:\.{_PRE})*)?(?:\+{_BUILD}(?:\.{_BUILD})*)?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What attributes are made of, besides the device itself."""

    stable: StableFacts
    leaves: Mapping[str, Neighbour] = field(default_factory=dict)
    """Adapter → the switch port at the other end."""


def attributes_of(resource: Resource, unit: Unit, device: PciDevice, facts: Facts) -> dict[str, Mapping[str, Any]]:
    """Tell what a unit of a resource is, and the device behind it. Which GPU it belongs to comes beside."""
    port = facts.stable.snapshot.parent(device) or device
    own = port.netdev
    rdma = next((r for r in port.rdma_devices if r.name in unit.rdma_devices), next(iter(port.rdma_devices), None))
    leaf = facts.leaves.get(port.address)
    layer = link_layer(port)
    numa_node = device.numa_node if device.numa_node != NO_NUMA_NODE else port.numa_node
    is_device = resource.kind in ("vf", "nic")
    towards_gpus = _towards_gpus(port, facts.stable.snapshot)
    own_root = device.path[0] if towards_gpus is not port else ""
    found: dict[str, Mapping[str, Any] | None] = {
        "resource": text(resource.name),
        "kind": text(resource.kind),
        "linkLayer": text(layer),
        "pf": text(port.address),
        "pfName": text(own.name if own is not None else ""),
        "rdmaDevice": text(rdma.name if rdma is not None and not device.is_vf else ""),
        "vendor": text(f"{device.vendor:04x}"),
        "device": text(f"{device.device:04x}"),
        "driver": text(device.driver or ""),
        "guid": _guid(rdma) if rdma is not None and layer == LinkLayer.INFINIBAND.value else None,
        "subnetPrefix": text(facts.stable.subnets.get(port.address, "")),
        "leaf": text((leaf.system_name or leaf.chassis) if leaf is not None else ""),
        "leafPort": text(leaf.port if leaf is not None else ""),
        "switch": text(_switch(towards_gpus) if towards_gpus is not None else ""),
        "pfPcieRoot": text(own_root),
        "vf": whole(device.vf_index),
        "rail": whole(facts.stable.rails.get(port.address)),
        "plane": whole(facts.stable.planes.get(port.address)),
        "speed": whole(facts.stable.speeds.get(port.address)),
        "firmware": version(rdma.fw_version if rdma is not None else ""),
        f"{STANDARD}/pciBusID": text(device.address),
        f"{STANDARD}/pcieRoot": text(towards_gpus.path[0] if towards_gpus is not None else ""),
        f"{STANDARD}/numaNode": whole(numa_node if numa_node != NO_NUMA_NODE else None),
        f"{MULTUS}/resourceName": text(resource.name if is_device else ""),
        f"{MULTUS}/deviceID": text(device.address if is_device else ""),
    }
    return {name: value for name, value in found.items() if value is not None}


def leaves_in(slices: Iterable[Mapping[str, Any]]) -> dict[str, Neighbour]:
    """Read back from our own ResourceSlices at which switch port each adapter's link ended.

    Raises Unavailable if others have written into them what is no slice.
    """
    found = {}
    for device in (device for each in slices for device in objects_at(each, "spec.devices")):
        names = ("pf", "leaf", "leafPort")
        pf, leaf, port = (at(device, f"attributes.{name}.string", str, "") for name in names)
        if pf and leaf:
            found[pf] = Neighbour("", port, leaf)
    return found


def common(each: Sequence[Attributes]) -> dict[str, Mapping[str, Any]]:
    """Keep what all devices of a place say alike."""
    first, *others = each
    return {
        name: value
        for name, value in first.items()
        if name not in OWN_ALONE and all(other.get(name) == value for other in others)
    }


def gpu_alias(dra: Dra, gpus: Sequence[str], address: str = "") -> dict[str, Mapping[str, Any]]:
    """Name GPUs as their own driver does, so that a claim can match device and GPU. Several need lists in the API.

    `address` is the PCI address of the GPU that a place is near to; empty for any other device, which has its own.
    A GPU that NVML does not show has no UUID here: what is told in its place would match no device of its driver.
    """
    uuids = [gpu for gpu in gpus if not is_pci_address(gpu)]
    uuid = {"strings": uuids} if len(uuids) > 1 else text("".join(uuids))
    told = {UUID: uuid, BUS_ID: text(address)}
    values = {name: told.get(name.rpartition("/")[2]) for name in dra.aliases}
    return {name: value for name, value in values.items() if value is not None}


def numa_aliases(dra: Dra, attributes: Attributes) -> dict[str, Mapping[str, Any]]:
    """Tell the NUMA node by the names that other drivers use."""
    value = attributes.get(f"{STANDARD}/numaNode")
    return {name: value for name in dra.aliases if name.endswith("/numaNode") and value is not None}


def text(value: str) -> Mapping[str, Any] | None:
    """Spell a text; None for an empty one, and for one that the API takes no more of."""
    return {"string": value} if 0 < len(value.encode()) <= MAX_TEXT else None


def whole(value: int | None) -> Mapping[str, Any] | None:
    """Spell a whole number."""
    return {"int": value} if value is not None else None


def version(value: str) -> Mapping[str, Any] | None:
    """Spell a version; None for what is no semantic version."""
    return {"version": value} if len(value) <= MAX_TEXT and _VERSION.fullmatch(value) else None


def _guid(rdma: RdmaDevice) -> Mapping[str, Any] | None:
    return text(rdma.guid) if rdma.guid else None


def _towards_gpus(port: PciDevice, snapshot: Snapshot) -> PciDevice | None:
    """Find where an adapter's traffic with GPUs enters the PCI tree: its Data Direct function, else the adapter.

    None if that is not known.
    """
    if port.address in snapshot.data_direct.unknown:
        return None
    return snapshot.by_address.get(snapshot.data_direct.of.get(port.address, ""), port)


def _switch(port: PciDevice) -> str:
    """Name the switch that a port hangs on by its upstream port, which all that hang on it have in common.

    Above a device is the switch's downstream port, above that the upstream port; below a root port there is no switch.
    """
    return port.path[-3] if len(port.path) >= 5 else ""
