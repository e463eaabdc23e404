"""The hardware part of the status document: the PCIe tree, GPUs, NICs with their VFs, and rails. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from agent.chart import matrix
from agent.chart.tree import as_document, is_nic, tree
from agent.model.device import NO_NUMA_NODE, Gpu, Netdev, PciDevice, RdmaDevice, Snapshot

NOTHING: Mapping[str, Any] = MappingProxyType(dict.fromkeys(("tree", "gpus", "nics", "rails"), ()))
"""What is told of a node that nobody has looked at."""


def describe(snapshot: Snapshot) -> dict[str, Any]:
    """Describe GPUs, NICs and VFs, and how they hang together."""
    return {
        "tree": as_document(tree(snapshot)),
        "gpus": [_gpu(gpu, snapshot) for gpu in sorted(snapshot.gpus, key=lambda gpu: gpu.index)],
        "nics": [_nic(device, snapshot) for device in snapshot.devices if is_nic(device)],
        "rails": [
            {
                "gpu": gpu.uuid,
                "nics": [nic.address for nic in nics],
                "locality": place.name if place is not None else None,
            }
            for gpu, nics, place in matrix.rails(snapshot)
        ],
    }


def _gpu(gpu: Gpu, snapshot: Snapshot) -> dict[str, Any]:
    device = snapshot.by_address.get(gpu.pci_address)
    return {
        "uuid": gpu.uuid,
        "index": gpu.index,
        "address": gpu.pci_address,
        "name": gpu.name,
        "memoryBytes": gpu.memory_bytes,
        "numaNode": _numa(device),
        "driver": device.driver if device is not None else None,
        "nvlinks": sum(links for _, links in gpu.nvlinks),
        "migMode": gpu.mig_mode,
        "migDevices": [{"uuid": mig.uuid, "profile": mig.profile} for mig in gpu.mig_devices],
        "ailments": list(gpu.ailments),
    }


def _nic(device: PciDevice, snapshot: Snapshot) -> dict[str, Any]:
    return {
        "address": device.address,
        "numaNode": _numa(device),
        "driver": device.driver,
        "netdevs": [_netdev(netdev) for netdev in device.netdevs if not netdev.is_representor],
        "rdma": [_rdma(rdma) for rdma in device.rdma_devices],
        "totalVfs": device.sriov_totalvfs,
        "vfs": [_vf(snapshot.by_address[vf]) for vf in device.vfs if vf in snapshot.by_address],
    }


def _vf(vf: PciDevice) -> dict[str, Any]:
    return {
        "address": vf.address,
        "index": vf.vf_index,
        "driver": vf.driver,
        "netdev": vf.netdev.name if vf.netdev is not None else None,
        "rdma": vf.rdma_devices[0].name if vf.rdma_devices else None,
    }


def _netdev(netdev: Netdev) -> dict[str, Any]:
    return {
        "name": netdev.name,
        "state": netdev.operstate,
        "mtu": netdev.mtu,
        "speedMbps": netdev.speed_mbps,
        "linkLayer": netdev.link_layer.value,
    }


def _rdma(rdma: RdmaDevice) -> dict[str, Any]:
    return {
        "name": rdma.name,
        "firmware": rdma.fw_version,
        "ports": [
            {"number": port.number, "state": port.state, "linkLayer": port.link_layer.value, "rateGbps": port.rate_gbps}
            for port in rdma.ports
        ],
    }


def _numa(device: PciDevice | None) -> int | None:
    return device.numa_node if device is not None and device.numa_node != NO_NUMA_NODE else None
