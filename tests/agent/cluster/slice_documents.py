"""Slices of a pool, as they are handed to the publisher: without generation and owner."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

DOWN: Mapping[str, str] = {"key": "nodefabric.io/LinkDown", "effect": "NoSchedule"}


def pool_slice(number: int, count: int, devices: Sequence[str], resource: str = "rdma/vf") -> dict[str, Any]:
    """One slice of so many."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{number}"},
        "spec": {
            "driver": "nodefabric.io",
            "nodeName": "n",
            "pool": {"name": "n", "resourceSliceCount": count},
            "devices": [{"name": name, "attributes": {"resource": {"string": resource}}} for name in devices],
        },
    }


def pool(count: int, resource: str = "rdma/vf") -> tuple[dict[str, Any], ...]:
    """A whole pool: slice i has the device vf-i."""
    return tuple(pool_slice(number, count, [f"vf-{number}"], resource) for number in range(count))


def tainted(document: dict[str, Any], device: str, taint: Mapping[str, str]) -> dict[str, Any]:
    """The slice with one more taint."""
    found = copy.deepcopy(document)
    for one in found["spec"]["devices"]:
        if one["name"] == device:
            one.setdefault("taints", []).append(dict(taint))
    return found
