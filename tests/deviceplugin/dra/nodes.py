"""Recorded and made-up nodes, and what is offered of them by DRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent.config import Config, Dra, Resource
from agent.model.device import PciDevice, Snapshot
from agent.model.health import Reason, unhealthy
from agent.offer.offer import Offer, Unit
from agent.offer.units import plain_offer
from deviceplugin.dra.attributes import Facts, StableFacts, stable_facts
from deviceplugin.dra.devices import Document, DraDevice, devices_of, slices_of
from tests.node import recorded_node as recorded_node

DRIVER, NODE = "nodefabric.io", "node-1"
GPU_NODES = (
    *("h100-8gpu", "a100-8gpu-4nic", "efa", "b200-8gpu-2nic"),
    *("v100-16gpu", "gb200-4gpu", "gb300-4gpu", "one-numa-node", "epyc-no-switch"),
)
VF, HCA, NIC = (
    Resource("rdma/vf", "vf", offer="dra"),
    Resource("rdma/hca", "hca", shares=63, offer="dra"),
    Resource("rdma/nic", "nic", offer="dra"),
)
PF, FIRST, SECOND = "0000:12:00.0", "0000:12:00.1", "0000:12:00.2"


def with_vfs(snapshot: Snapshot, count: int) -> Snapshot:
    """Give each PF that has VFs so many, all like its first one."""
    devices: list[PciDevice] = []
    for device in snapshot.devices:
        if device.is_vf:
            continue
        if device.vfs:
            first = snapshot.by_address[device.vfs[0]]
            domain_bus = device.address.rpartition(":")[0]
            vfs = tuple(f"{domain_bus}:{(i + 8) // 8:02x}.{(i + 8) % 8}" for i in range(count))
            devices += [
                replace(first, address=vf, vf_index=i, path=(*device.path[:-1], vf)) for i, vf in enumerate(vfs)
            ]
            device = replace(device, vfs=vfs, sriov_totalvfs=max(count, device.sriov_totalvfs))
        devices.append(device)
    return replace(snapshot, devices=tuple(sorted(devices, key=lambda d: d.address)))


def late(resource: Resource) -> Resource:
    return replace(resource, binding="late")


@dataclass
class Offered:
    """What is offered of a node."""

    snapshot: Snapshot
    resources: Sequence[Resource] = (VF,)
    dra: Dra = field(default_factory=Dra)
    offer: Offer | None = None
    evict: tuple[str, ...] = ()

    @property
    def config(self) -> Config:
        config = Config(resources=tuple(self.resources), dra=self.dra)
        return replace(config, health=replace(config.health, evict=self.evict))

    @property
    def devices(self) -> tuple[DraDevice, ...]:
        offer = self.offer or plain_offer(self.resources, self.snapshot)
        return devices_of(self.config, offer, Facts(stable_facts(offer, StableFacts())))

    @property
    def slices(self) -> tuple[Document, ...]:
        return slices_of(self.devices, self.dra.driver, NODE)


def value(device: DraDevice, name: str) -> Any:
    """Read an attribute, whatever its type; None if it is not there."""
    return next(iter(device.attributes.get(name, {"": None}).values()))


def ill(offer: Offer, reason: Reason, *devices: str) -> Offer:
    """Return an offer in which devices are ill."""

    def with_health(unit: Unit) -> Unit:
        return replace(unit, health=unhealthy(reason)) if unit.device in devices else unit

    return replace(offer, claimable={name: tuple(map(with_health, units)) for name, units in offer.claimable.items()})
