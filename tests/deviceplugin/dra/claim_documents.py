"""ResourceClaims as the API server has them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from agent.model.allocation import ClaimRef, PodRef
from tests.sim.cluster.dra_documents import allocated

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


claim = partial(allocated, ref=REF, pods=(POD,), node=NODE)
"""A claim that is allocated on this node, and reserved for some pods and PodGroups."""
