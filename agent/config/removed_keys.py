"""Keys that a file may not have: those of former versions are read with a warning that says what to do, those of other
device plugins are refused with what to write instead."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SRIOV = "is a key of sriov-network-device-plugin, whose own file --sriov-config takes as it is: here write"
_SHARED = "is a key of k8s-rdma-shared-dev-plugin, whose own file --rdma-shared-config takes as it is: here write"


OF_OTHER_PLUGINS: Mapping[str, str] = MappingProxyType(
    {
        "resourceList": f"{_SRIOV} its pools as entries of `resources`",
        "resourceName": f"{_SRIOV} name: PREFIX/NAME",
        "resourcePrefix": f"{_SRIOV} it into the name, PREFIX/NAME",
        "deviceType": f"{_SRIOV} kind: vf, nic or accelerator",
        "selectors": f"{_SRIOV} select",
        "pfNames": f"{_SRIOV} pf",
        "linkTypes": f"{_SRIOV} linkLayer: [Ethernet] or [InfiniBand]",
        "additionalInfo": "is a key of sriov-network-device-plugin, and only its own file (--sriov-config) can have it",
        "configList": f"{_SHARED} its pools as entries of `resources` of kind hca",
        "rdmaHcaMax": f"{_SHARED} shares",
        "ifNames": f"{_SHARED} netdevs",
        "deviceIDs": f"{_SHARED} devices",
        "periodicUpdateInterval": f"{_SHARED} rescanSeconds",
    }
)
"""A key that both files have is named for the first."""

_FIXED = "has no effect any more, the value is always {}: take it out"
_ON_NODE = "has no effect any more, labels are always set on the Node itself: take it out"
GONE: Mapping[str, str] = {
    "topology.coalesceSeconds": _FIXED.format("2"),
    "topology.bandwidth.sampleSeconds": _FIXED.format("15"),
    "topology.bandwidth.annotationSeconds": _FIXED.format("600"),
    "topology.labels.to": _ON_NODE,
    "topology.labels.nfdFile": _ON_NODE,
    "health.xidQuietSeconds": _FIXED.format("300"),
    "dra.status": "has no effect any more, the claim's status is always written: take it out",
}
"""Where the key was, and what to do."""


def without_gone(document: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a document without such keys, and the warnings."""
    left, warnings = copy.deepcopy(document), []
    for path, text in GONE.items():
        *outer, key = path.split(".")
        holder = left
        for name in outer:
            holder = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and key in holder:
            del holder[key]
            warnings.append(f"{path}: {text}")
    return left, tuple(warnings)
