"""ResourceClaims as the API server has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.model.allocation import ClaimRef, PodRef

DRIVER = "nodefabric.io"
NODE = "node-1"
REF = ClaimRef("7e2f6a52-0c1d-4b7e-9c55-5b4c8ad6b111", "team", "two-rails")
POD = PodRef("team", "trainer", "0c0ffee0-1111-4222-8333-444455556666")


def result(request: str, device: str, **more: Any) -> dict[str, Any]:
    """One device of ours, in the pool of this node."""
    return {"request": request, "driver": DRIVER, "pool": NODE, "device": device, **more}


def network(source: str = "FromClaim", requests: Sequence[str] = (), driver: str = DRIVER, **keys: Any) -> Any:
    """Parameters of ours."""
    parameters = {"apiVersion": "nodefabric.io/v1alpha1", "kind": "Network", **keys}
    return {"source": source, "requests": list(requests), "opaque": {"driver": driver, "parameters": parameters}}


def claim(
    *results: Mapping[str, Any],
    config: Sequence[Any] = (),
    ref: ClaimRef = REF,
    pods: Sequence[PodRef] = (POD,),
    groups: Sequence[str] = (),
    owner: PodRef | None = None,
    extended: bool = False,
    devices: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A claim that is allocated, and reserved for some pods and PodGroups. `devices` is what its spec says of them."""
    meta: dict[str, Any] = {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid}
    if owner is not None:
        of = {"apiVersion": "v1", "kind": "Pod", "name": owner.name, "uid": owner.uid, "controller": True}
        meta["ownerReferences"] = [of]
    if extended:
        meta["annotations"] = {"resource.kubernetes.io/extended-resource-claim": "true"}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": meta,
        "spec": {"devices": dict(devices or {})},
        "status": {
            "allocation": {"devices": {"results": [dict(r) for r in results], "config": list(config)}},
            "reservedFor": [
                *({"resource": "pods", "name": pod.name, "uid": pod.uid} for pod in pods),
                *({"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": g, "uid": g} for g in groups),
            ],
        },
    }
