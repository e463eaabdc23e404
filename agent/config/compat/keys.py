"""Keys of other device plugins' files that are met in ours, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
