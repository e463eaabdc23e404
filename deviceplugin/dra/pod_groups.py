"""Which pods of this node a claim is for that is reserved for a PodGroup (Kubernetes 1.37, KEP-5729).

`status.reservedFor` names the group alone, and kubelet hands over no pod. A pod's own spec names its group:
`spec.schedulingGroup.podGroupName`. Not every pod of a group has its claims: one that has names the claim in its spec,
or in its status where the claim was made from the group's template. kubelet prepares a claim for no other pod. kubelet
lists the node's pods, so nothing but single pods is read from the API server. A missing answer costs nearness, never
the pod: ADD finds out whose the claim is by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from agent.errors import AgentError
from agent.kubelet.podresources import PodDevices
from agent.model.allocation import PodRef
from agent.model.fields import at
from deviceplugin.dra import pod_facts
from deviceplugin.dra.allocation import Allocation

MOST_READ = 32
"""So many pods are read for a claim."""

log = logging.getLogger(__name__)


class Kubelet(Protocol):
    """Lists the pods of the node."""

    def pods(self) -> Sequence[PodDevices]:
        """Ask what every pod holds. Raises Unavailable."""


class Pods(Protocol):
    """Reads pods from the API server."""

    def pod(self, pod: PodRef) -> Mapping[str, Any] | None:
        """Read a pod; None if there is none. Raises Unavailable."""


class PodGroups:
    """Finds the members of groups. Blocks, and may be used by many threads at once."""

    def __init__(self, kubelet: Kubelet, pods: Pods) -> None:
        self._kubelet = kubelet
        self._pods = pods

    def with_members(self, claim: Allocation) -> Allocation:
        """Add the pods of this node that have the claim, and belong to a group that it is reserved for."""
        if not claim.groups:
            return claim
        try:
            members = tuple(self._members(claim))
        except AgentError as error:
            log.warning("the pods of claim %s, which is reserved for a PodGroup, are not known: %s", claim.ref, error)
            return claim
        return replace(claim, pods=(*claim.pods, *(pod for pod in members if pod not in claim.pods)))

    def _members(self, claim: Allocation) -> Iterator[PodRef]:
        here = [found for found in self._kubelet.pods() if found.pod.namespace == claim.ref.namespace]
        named = [found for found in here if any(each.claim == claim.ref.name for each in found.claimed)]
        for found in (named or here)[:MOST_READ]:
            document = self._pods.pod(found.pod)
            if document is not None and _has(document, claim):
                yield replace(found.pod, uid=at(document, "metadata.uid", str))


def _has(pod: Mapping[str, Any], claim: Allocation) -> bool:
    return pod_facts.group_of(pod) in claim.groups and claim.ref.name in pod_facts.claim_names(pod).values()
