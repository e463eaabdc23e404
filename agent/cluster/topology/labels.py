"""Labels of the node, made of facts that change slowly or never. Pure.

A fact that is not known at the moment (no switch has spoken yet, an adapter is in a pod) leaves its label as it is:
nothing momentary may take a label away, since schedulers build their picture of the fabric from labels.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from agent.config.topology import NIC, OF_NIC, PLANE, RAIL, LabelRule
from agent.hardware.lldp import Neighbour
from agent.model.device import Gpu, PciDevice, Snapshot, is_accelerator
from agent.model.vf_identity import RailKey
from agent.placement import Distances

MAX_VALUE = 63
NO_NAMES: Mapping[str, str] = MappingProxyType({})
NO_RAILS: Mapping[str, RailKey] = MappingProxyType({})
NO_NICS: Mapping[str, FabricNic] = MappingProxyType({})
NVIDIA = 0x10DE

_MODELS = {
    (0x15B3, 0x1007): "ConnectX-3-Pro",
    (0x15B3, 0x1013): "ConnectX-4",
    (0x15B3, 0x1015): "ConnectX-4-Lx",
    (0x15B3, 0x1017): "ConnectX-5",
    (0x15B3, 0x1019): "ConnectX-5-Ex",
    (0x15B3, 0x101B): "ConnectX-6",
    (0x15B3, 0x101D): "ConnectX-6-Dx",
    (0x15B3, 0x101F): "ConnectX-6-Lx",
    (0x15B3, 0x1021): "ConnectX-7",
    (0x15B3, 0x1023): "ConnectX-8",
    (0x15B3, 0xA2D6): "BlueField-2",
    (0x15B3, 0xA2DC): "BlueField-3",
    (0x8086, 0x1592): "E810-C",
    (0x8086, 0x1593): "E810-C",
    (0x8086, 0x159B): "E810-XXV",
    (0x14E4, 0x1750): "BCM57508",
    (0x1D0F, 0xEFA0): "EFA",
    (0x1D0F, 0xEFA1): "EFA",
    (0x1D0F, 0xEFA2): "EFA",
    (0x1D0F, 0xEFA3): "EFA",
}
"""Names for PCI vendor and device, as in the PCI ID database; any other adapter is called by its numbers."""


@dataclass(frozen=True, slots=True)
class LabelFacts:
    """What labels can be made of."""

    node_name: str
    snapshot: Snapshot
    nics: Sequence[PciDevice]
    """The node's adapters to the fabric, the one of the first rail first."""
    neighbour: Callable[[str], Neighbour | None]
    """PCI address → the switch port at the other end."""
    first_line: Callable[[Path], str | None]
    rails: Mapping[str, RailKey] = field(default_factory=dict)
    """Adapter → the number of its rail, and which plane of it it is."""


@dataclass(frozen=True, slots=True)
class FabricNic:
    """What an adapter to the fabric was like when all of it was there."""

    driver: str | None
    netdev: str
    """Its interface, by which it may be named."""


def fabric_nics(
    snapshot: Snapshot,
    netdevs: Sequence[str] = (),
    host_names: Mapping[str, str] = NO_NAMES,
    before: Mapping[str, FabricNic] = NO_NICS,
    rails: Mapping[str, RailKey] = NO_RAILS,
) -> tuple[PciDevice, ...]:
    """List the adapters to the fabric: those of the named interfaces in that order, else all with an RDMA device.

    Then `rails`, adapter → number and plane, come first, in their order, whether they have one or not.

    `host_names` are the interface names, in the host, of adapters that are in pods; `before` those that belonged
    here so far, by address: they do so while their driver is away or starts again, and not with another one.
    """
    adapters = [device for device in snapshot.devices if not (device.is_vf or is_accelerator(device))]
    away = {d.address for d in adapters if d.address in before and d.driver in (None, before[d.address].driver)}
    if netdevs:
        by_name = {before[d.address].netdev: d for d in adapters if d.address in away and not d.netdevs}
        by_name |= {host_names[device.address]: device for device in adapters if device.address in host_names}
        by_name |= {netdev.name: device for device in adapters for netdev in device.netdevs}
        return tuple(dict.fromkeys(by_name[name] for name in netdevs if name in by_name))
    found = (d for d in adapters if d.rdma_devices or d.address in away or d.address in rails)
    return tuple(sorted(found, key=lambda device: (rails.get(device.address, (math.inf, 0)), device.address)))


def labels(rules: Iterable[LabelRule], known: LabelFacts, kept: Mapping[str, str]) -> dict[str, str]:
    """Make the labels. `kept` are the present ones, for facts that are not known now."""
    found: dict[str, str] = {}
    for rule in rules:
        for key, value in _values(rule, known):
            text = kept.get(key) if value is None else label_value(_matched(rule, value))
            if text:
                found[key] = text
    return found


def label_value(text: str) -> str:
    """Make a label value of a text: 63 characters, what is not allowed in one becoming dashes.

    A longer text is cut, with a hash of the whole at the end: two of them must not become one.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    if len(plain) > MAX_VALUE:
        plain = f"{plain[: MAX_VALUE - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return plain.strip("._-")


def _matched(rule: LabelRule, value: str) -> str:
    if rule.pattern is None:
        return value
    match = re.search(rule.pattern, value)
    return (match[1] or "") if match is not None else ""


def _values(rule: LabelRule, known: LabelFacts) -> Iterable[tuple[str, str | None]]:
    if rule.is_per_nic:
        made = set[str]()
        for nic in known.nics:
            key = _key(rule.key, nic, known)
            if key is not None and key not in made:  # without {plane}, a rail's first plane speaks for all
                made.add(key)
                yield key, _of_nic(rule.fact, nic, known)
    elif rule.fact in OF_NIC and rule.fact not in ("hca-model", "hca-firmware"):
        # One value per level: in a rail fabric the switch of the first rail is common to the nodes of one unit.
        yield rule.key, _of_nic(rule.fact, known.nics[0], known) if known.nics else None
    else:
        yield rule.key, _of_node(rule, known)


def _key(key: str, nic: PciDevice, known: LabelFacts) -> str | None:
    """Fill in a NIC's key; None if that is of rails, and the NIC is none."""
    rail = known.rails.get(nic.address)
    if rail is None and (RAIL in key or PLANE in key):
        return None
    number, plane = rail or ("", "")
    return key.replace(NIC, nic.address.replace(":", "-")).replace(RAIL, str(number)).replace(PLANE, str(plane))


def _of_nic(fact: str, nic: PciDevice, known: LabelFacts) -> str | None:
    if fact.startswith("leaf-"):
        neighbour = known.neighbour(nic.address)
        if neighbour is None:
            return None
        named = {"leaf-switch": neighbour.system_name or neighbour.chassis, "leaf-chassis": neighbour.chassis}
        return named.get(fact, neighbour.port)
    if fact == "hca-model":
        return _MODELS.get((nic.vendor, nic.device), f"{nic.vendor:04x}-{nic.device:04x}")
    rdma = next((r for r in nic.rdma_devices if not r.absent), None)
    if rdma is None:
        return None
    return (rdma.fw_version if fact == "hca-firmware" else rdma.node_guid.replace(":", "")) or None


def _of_node(rule: LabelRule, known: LabelFacts) -> str | None:
    snapshot = known.snapshot
    match rule.fact:
        case "node-name":
            return known.node_name
        case "text":
            return rule.text
        case "file":
            return known.first_line(rule.path) if rule.path is not None else None
        case "rails":
            unknown = snapshot.data_direct.unknown.intersection(nic.address for nic in known.nics)
            return None if unknown else str(rail_count(snapshot, known.nics, known.rails))
        case "planes":
            return str(1 + max(plane for _, plane in known.rails.values())) if known.rails else None
        case "hca-count":
            return str(len(known.nics))
        case "gpu-count":
            return str(len(snapshot.all_gpus))
        case "gpu-model":
            return _joined(gpu.name for gpu in snapshot.gpus or _of_other_vendors(snapshot))
        case "nvlink-domain":
            return _joined(gpu.fabric_clique for gpu in snapshot.gpus)
        case _:
            return _joined(_of_nic(rule.fact, nic, known) for nic in known.nics)


def rail_count(snapshot: Snapshot, nics: Sequence[PciDevice], rails: Mapping[str, RailKey] = NO_RAILS) -> int:
    """Count the rails: adapters that are the nearest of some GPU, no more than GPUs; without GPUs, all adapters.

    Planes of one rail count once.
    """
    distances = Distances(snapshot)
    ports = [nic.address for nic in nics]
    nearest = {port for gpu in distances.gpus for port in distances.nearest(gpu, ports)} if distances.gpus else ports
    count = len({rails[port][0] if port in rails else port for port in nearest})
    return min(len(distances.gpus), count) if distances.gpus else count


def _of_other_vendors(snapshot: Snapshot) -> tuple[Gpu, ...]:
    """List the accelerators that sysfs names. NVIDIA's have their names from NVML, which may answer later."""
    return tuple(gpu for gpu in snapshot.accelerators if snapshot.by_address[gpu.pci_address].vendor != NVIDIA)


def _joined(values: Iterable[str | None]) -> str | None:
    """Make one value of what all adapters or GPUs say: theirs, if it is the same; None as long as one says nothing."""
    found = list(values)
    if not found or not all(found):
        return None
    return "_".join(sorted({value for value in found if value}))
