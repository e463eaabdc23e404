"""What doctor asks the API server: kubelet's version on this node, and the cluster's DeviceClasses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.cluster.apiserver import CLASS, NODE, ApiServer
from agent.errors import Unavailable
from agent.report.doctor.facts import ClusterFacts, DeviceClass


def look(api: ApiServer, node_name: str) -> ClusterFacts:
    """Ask. Blocks; never raises: what is not answered is left out, with the reason."""
    version = ""
    try:
        node = api.get(NODE, node_name) or {}
        version = str(node.get("status", {}).get("nodeInfo", {}).get("kubeletVersion", ""))
        _, classes = api.list_of(CLASS, {}, _device_class)
    except Unavailable as error:
        return ClusterFacts(version, None, str(error))
    return ClusterFacts(version, tuple(classes))


def _device_class(found: Mapping[str, Any]) -> DeviceClass:
    selectors = found["spec"].get("selectors") or ()
    return DeviceClass(found["metadata"]["name"], tuple(one["cel"]["expression"] for one in selectors if "cel" in one))
