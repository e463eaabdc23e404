"""Claims for GPUs with NICs, and what a GPU driver publishes: NVIDIA's, or AMD's on a node without NVIDIA's GPUs.

Source: Kubernetes 1.36, staging/src/k8s.io/api/resource/v1/types.go; the attributes' names are those of NVIDIA's
k8s-dra-driver-gpu and of ROCm's k8s-gpu-dra-driver, which has no UUID, and its NUMA node in
a domain of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.model.device import NO_NUMA_NODE, Snapshot

GPU_DRIVER, NIC_DRIVER = "gpu.nvidia.com", "nodefabric.io"
UUID, PCIE_ROOT, NUMA_NODE = "gpu.nvidia.com/uuid", "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/numaNode"
PCI_BUS_ID = "resource.kubernetes.io/pciBusID"
GPU_CLASS, NIC_CLASS = "gpu.nvidia.com", "rdma-nic"
AMD = "gpu.amd.com"
"""Driver and class of AMD's GPUs."""


def gpu_slice(snapshot: Snapshot, node: str) -> Mapping[str, Any]:
    """Make the slice of a node's GPUs."""
    driver = GPU_DRIVER if snapshot.gpus else AMD
    devices = []
    for gpu in snapshot.gpus or snapshot.all_gpus:
        pci = snapshot.by_address[gpu.pci_address]
        attributes: dict[str, Any] = {
            "type": {"string": "gpu" if driver == GPU_DRIVER else "amdgpu"},
            "productName": {"string": gpu.name},
            PCI_BUS_ID: {"string": pci.address},
            PCIE_ROOT: {"string": pci.path[0]},
        }
        if driver == GPU_DRIVER:
            attributes["uuid"] = {"string": gpu.uuid}
        if pci.numa_node != NO_NUMA_NODE:
            attributes[NUMA_NODE if driver == GPU_DRIVER else f"{AMD}/numaNode"] = {"int": pci.numa_node}
        devices.append({"name": f"gpu-{gpu.index}", "attributes": attributes})
    pool = {"name": node, "resourceSliceCount": 1, "generation": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": devices}
    return {"metadata": {"name": f"{node}-{driver}-abcde"}, "spec": spec}


def classes(resource: str) -> Mapping[str, Mapping[str, Any]]:
    """Make the classes of GPUs and of a resource of ours, which unchanged pods may ask for too."""
    ours = f'device.driver == "{NIC_DRIVER}" && device.attributes["{NIC_DRIVER}"].resource == "{resource}"'
    return {
        GPU_CLASS: _class(f'device.driver == "{GPU_DRIVER}" && device.attributes["{GPU_DRIVER}"].type == "gpu"'),
        AMD: _class(f'device.driver == "{AMD}"'),
        NIC_CLASS: _class(ours, extendedResourceName=resource),
    }


def pairs(count: int, attribute: str, gpu_class: str = GPU_CLASS) -> Mapping[str, Any]:
    """Ask for so many GPUs, each with a NIC that has an attribute in common with it; pair by pair."""
    requests = [
        {"name": f"{what}-{number}", "exactly": {"deviceClassName": name}}
        for number in range(count)
        for what, name in (("gpu", gpu_class), ("nic", NIC_CLASS))
    ]
    constraints = [{"requests": [f"gpu-{n}", f"nic-{n}"], "matchAttribute": attribute} for n in range(count)]
    return claim(requests, constraints)


def preferred_pairs(count: int, attribute: str) -> Mapping[str, Any]:
    """Ask for so many GPUs, each with a NIC that has an attribute in common with it if there is one."""
    requests: list[Mapping[str, Any]] = []
    for number in range(count):
        ways = [{"name": name, "deviceClassName": NIC_CLASS} for name in ("near", "any")]
        requests += [
            {"name": f"nic-{number}", "firstAvailable": ways},
            {"name": f"gpu-{number}", "exactly": {"deviceClassName": GPU_CLASS}},
        ]
    constraints = [{"requests": [f"nic-{n}/near", f"gpu-{n}"], "matchAttribute": attribute} for n in range(count)]
    return claim(requests, constraints)


def claim(requests: Sequence[Mapping[str, Any]], constraints: Sequence[Mapping[str, Any]] = ()) -> Mapping[str, Any]:
    """Make a claim."""
    return {"spec": {"devices": {"requests": list(requests), "constraints": list(constraints)}}}


def _class(expression: str, **more: Any) -> Mapping[str, Any]:
    return {"spec": {"selectors": [{"cel": {"expression": expression}}], **more}}
