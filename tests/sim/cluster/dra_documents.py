"""Small valid objects of resource.k8s.io, for tests.

Source: Kubernetes 1.36, staging/src/k8s.io/api/resource/v1/types.go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.model.allocation import ClaimRef, PodRef

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims"
SHARE = "4dbd4caf-6f09-4c2f-8ad0-5e6d5ca4ce8d"
CLAIM, POD = ClaimRef("", "ns", "c"), PodRef("ns", "pod", "pod-uid")


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


def allocated(
    *results: Mapping[str, Any],
    ref: ClaimRef = CLAIM,
    pods: Sequence[PodRef] = (POD,),
    groups: Sequence[str] = (),
    node: str = "n",
    config: Sequence[Any] = (),
    owner: PodRef | None = None,
    extended: bool = False,
    devices: Any = None,
) -> dict[str, Any]:
    """A claim as the scheduler leaves it: allocated on a node, reserved for pods and PodGroups.

    `devices` is what its spec says of them. Without a UID in `ref`, the server is to give it one.
    """
    document = claim(ref.name, ref.namespace, devices)
    meta = document["metadata"]
    if ref.uid:
        meta["uid"] = ref.uid
    if owner is not None:
        of = {"apiVersion": "v1", "kind": "Pod", "name": owner.name, "uid": owner.uid, "controller": True}
        meta["ownerReferences"] = [of]
    if extended:
        meta["annotations"] = {"resource.kubernetes.io/extended-resource-claim": "true"}
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    of_devices: dict[str, Any] = {"results": [{"request": "nic", **result} for result in results]}
    if config:
        of_devices["config"] = list(config)
    reserved = [
        *({"resource": "pods", "name": pod.name, "uid": pod.uid} for pod in pods),
        *({"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": g, "uid": g} for g in groups),
    ]
    allocation = {"devices": of_devices, "nodeSelector": {"nodeSelectorTerms": [term]}}
    return {**document, "status": {"allocation": allocation, "reservedFor": reserved}}
