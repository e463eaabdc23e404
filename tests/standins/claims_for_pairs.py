"""Claims for GPUs with NICs, and what a GPU driver publishes, as NVIDIA's does.

Source: Kubernetes 1.36, staging/src/k8s.io/api/resource/v1/types.go; the attributes' names are those of NVIDIA's
k8s-dra-driver-gpu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.model.device import NO_NUMA_NODE, Snapshot

GPU_DRIVER, NIC_DRIVER = "gpu.nvidia.com", "nodefabric.io"
UUID, PCIE_ROOT, NUMA_NODE = "gpu.nvidia.com/uuid", "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/numaNode"
GPU_CLASS, NIC_CLASS = "gpu.nvidia.com", "rdma-nic"


def gpu_slice(snapshot: Snapshot, node: str) -> Mapping[str, Any]:
    """Make the slice of a node's GPUs."""
    devices = []
    for gpu in snapshot.gpus:
        pci = snapshot.by_address[gpu.pci_address]
        attributes: dict[str, Any] = {
            "type": {"string": "gpu"},
            "uuid": {"string": gpu.uuid},
            "productName": {"string": gpu.name},
            "resource.kubernetes.io/pciBusID": {"string": pci.address},
            PCIE_ROOT: {"string": pci.path[0]},
        }
        if pci.numa_node != NO_NUMA_NODE:
            attributes[NUMA_NODE] = {"int": pci.numa_node}
        devices.append({"name": f"gpu-{gpu.index}", "attributes": attributes})
    pool = {"name": node, "resourceSliceCount": 1, "generation": 1}
    spec = {"driver": GPU_DRIVER, "nodeName": node, "pool": pool, "devices": devices}
    return {"metadata": {"name": f"{node}-{GPU_DRIVER}-abcde"}, "spec": spec}


def classes(resource: str) -> Mapping[str, Mapping[str, Any]]:
    """Make the classes of GPUs and of a resource of ours, which unchanged pods may ask for too."""
    ours = f'device.driver == "{NIC_DRIVER}" && device.attributes["{NIC_DRIVER}"].resource == "{resource}"'
    return {
        GPU_CLASS: _class(f'device.driver == "{GPU_DRIVER}" && device.attributes["{GPU_DRIVER}"].type == "gpu"'),
        NIC_CLASS: _class(ours, extendedResourceName=resource),
    }


def pairs(count: int, attribute: str) -> Mapping[str, Any]:
    """Ask for so many GPUs, each with a NIC that has an attribute in common with it; pair by pair."""
    requests = [
        {"name": f"{what}-{number}", "exactly": {"deviceClassName": name}}
        for number in range(count)
        for what, name in (("gpu", GPU_CLASS), ("nic", NIC_CLASS))
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
