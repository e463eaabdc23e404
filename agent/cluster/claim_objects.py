"""What else the API server knows of a pod with claims: its object, its other claims, other drivers' devices here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.cluster.apiserver import CLAIM, POD, SLICE, ApiServer
from agent.model.allocation import PodRef
from agent.model.fields import at


class ClaimObjects:
    """Reads these. Blocks: call it from a thread, and from as many as the client has requests at once."""

    def __init__(self, api: ApiServer, node_name: str) -> None:
        self._api = api
        self._node_name = node_name

    def pod(self, pod: PodRef) -> Mapping[str, Any] | None:
        """Read a pod; None if there is none, or another one of its name. Raises Unavailable."""
        found = self._api.current(POD.within(pod.namespace), pod.name)
        return found if found is not None and pod.uid in ("", at(found, "metadata.uid", str)) else None

    def claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Read a claim, whatever its UID; None if there is none. Raises Unavailable."""
        return self._api.current(CLAIM.within(namespace), name)

    def slices(self, driver: str) -> Sequence[Mapping[str, Any]]:
        """List this node's ResourceSlices of a driver. Raises Unavailable."""
        selector = {"spec.driver": driver, "spec.nodeName": self._node_name}
        _, found = self._api.list_of(SLICE, selector, dict)
        return found
