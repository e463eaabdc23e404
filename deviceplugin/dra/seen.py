"""What the node's devices are like when all of them is there. Pure.

An interface and an RDMA device leave the host with their pod, a driver comes anew, a link that is down tells no speed.
What is published of a device must not follow: each change is a write for the whole cluster. So what was seen of a
device stays until something else is seen, and a device that is gone stays as long as it is offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from agent.model.device import Gpu, LinkLayer, PciDevice, Snapshot
from agent.offer.offer import Offer
from agent.placement import Distances


@dataclass(frozen=True)
class Seen:
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


def look(offer: Offer, before: Seen) -> Seen:
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
    seen = Seen(snapshot, speeds, subnets, offer.rail_of, offer.plane_of)
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
