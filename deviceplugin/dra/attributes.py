"""What a ResourceSlice says of a device, by which claims choose: stable facts, never a link's state or a counter. Pure.

Names without a domain are the driver's own. Values are of the API's form, such as `{"string": "vf"}`; what is not
known, or does not fit, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.config import Dra, Resource
from agent.model.device import NO_NUMA_NODE, LinkLayer, PciDevice, RdmaDevice, Snapshot, is_pci_address
from agent.model.fields import at, objects_at
from agent.model.lldp import Neighbour
from agent.offer.offer import Unit
from agent.offer.units import guid_hex
from deviceplugin.dra.seen import Seen, link_layer

STANDARD = "resource.kubernetes.io"
MULTUS = "k8s.cni.cncf.io"
UUID, BUS_ID = "uuid", "pciBusID"
"""What attributes that name a GPU are called, behind the domain."""
MAX_TEXT = 64
"""Bytes of a string, and of a version."""
OWN_ALONE = frozenset({"vf", f"{STANDARD}/pciBusID", f"{MULTUS}/deviceID"})
"""Attributes that tell one device from the others of its place."""
LISTS = ("strings", "ints")

Attributes = Mapping[str, Mapping[str, Any]]

# semver.org 2.0.0, as the API server reads it.
_NUMBER, _PRE, _BUILD = r"(?:0|[1-9]\d*)", r"(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)", r"[0-9a-zA-Z-]+"
_VERSION = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-{_PRE}(?:\.{_PRE})*)?(?:\+{_BUILD}(?:\.{_BUILD})*)?", re.ASCII
)
_NO_GUID = frozenset({"", "0" * 16})


@dataclass(frozen=True, slots=True)
class Facts:
    """What attributes are made of, besides the device itself."""

    seen: Seen
    leaves: Mapping[str, Neighbour] = field(default_factory=dict)
    """Adapter → the switch port at the other end."""


def attributes_of(resource: Resource, unit: Unit, device: PciDevice, facts: Facts) -> dict[str, Mapping[str, Any]]:
    """Tell what a unit of a resource is, and the device behind it. Which GPU it belongs to comes beside."""
    port = facts.seen.snapshot.parent(device) or device
    own = port.netdev
    rdma = next((r for r in port.rdma_devices if r.name in unit.rdma_devices), next(iter(port.rdma_devices), None))
    leaf = facts.leaves.get(port.address)
    layer = link_layer(port)
    numa_node = device.numa_node if device.numa_node != NO_NUMA_NODE else port.numa_node
    is_device = resource.kind in ("vf", "nic")
    towards_gpus = _towards_gpus(port, facts.seen.snapshot)
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
        "subnetPrefix": text(facts.seen.subnets.get(port.address, "")),
        "leaf": text((leaf.system_name or leaf.chassis) if leaf is not None else ""),
        "leafPort": text(leaf.port if leaf is not None else ""),
        "switch": text(_switch(towards_gpus) if towards_gpus is not None else ""),
        "pfPcieRoot": text(own_root),
        "vf": whole(device.vf_index),
        "rail": whole(facts.seen.rails.get(port.address)),
        "plane": whole(facts.seen.planes.get(port.address)),
        "speed": whole(facts.seen.speeds.get(port.address)),
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
    guid = guid_hex(rdma)
    return text(guid) if guid not in _NO_GUID else None


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
