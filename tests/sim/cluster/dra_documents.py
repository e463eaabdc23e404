"""Small valid objects of resource.k8s.io, for tests.

Source: Kubernetes 1.36, staging/src/k8s.io/api/resource/v1/types.go.
"""

from __future__ import annotations

from typing import Any

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims"
SHARE = "4dbd4caf-6f09-4c2f-8ad0-5e6d5ca4ce8d"


def device(name: str = "vf-1", **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


def resource_slice(
    name: str = "a", *, driver: str = "nodefabric.io", node: str = "n", devices: Any = None, **spec: Any
) -> dict[str, Any]:
    """A whole slice of a pool with one."""
    content = {
        "driver": driver,
        "nodeName": node,
        "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
        "devices": [device()] if devices is None else devices,
    } | spec
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {key: value for key, value in content.items() if value is not None},
    }


def claim(name: str = "c", namespace: str = "ns", devices: Any = None) -> dict[str, Any]:
    """A claim for one device, unless told otherwise."""
    wanted = devices or {"requests": [{"name": "nic", "exactly": {"deviceClassName": "rdma-vf"}}]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"devices": wanted},
    }


def allocated(*results: dict[str, Any], node: str = "n", pod: str = "pod-uid", **claimed: Any) -> dict[str, Any]:
    """A claim as the scheduler leaves it: allocated on a node, reserved for a pod."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    allocation = {
        "devices": {"results": [{"request": "nic", **result} for result in results]},
        "nodeSelector": {"nodeSelectorTerms": [term]},
    }
    reserved = [{"resource": "pods", "name": "pod", "uid": pod}]
    return {**claim(**claimed), "status": {"allocation": allocation, "reservedFor": reserved}}
