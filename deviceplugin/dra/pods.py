"""What kubelet and the API server say of a claim's pods: their GPUs, containers, other claims and PodGroups.

A late-bound device should be near to the GPUs of its pod, whoever gave them. Asked in this order, and no further once
there is an answer: kubelet, for units of any device plugin, and the claim itself, for devices of other DRA drivers;
then the pod's other claims. A driver publishes in its ResourceSlices which GPU a device is.

A claim may be reserved for a PodGroup (Kubernetes 1.37, KEP-5729). `status.reservedFor` names the group alone, and
kubelet hands over no pod. A pod's own spec names its group: `spec.schedulingGroup.podGroupName`. Not every pod of a
group has its claims: one that has names the claim in its spec, or in its status where the claim was made from the
group's template. kubelet prepares a claim for no other pod, and lists the node's pods.

A wrong or missing answer costs bandwidth, never the pod: ADD finds out by itself whose the claim is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from agent.errors import AgentError, ClaimInvalid
from agent.kubelet.podresources import AsksKubelet
from agent.model.allocation import ClaimRef, PodRef
from agent.model.fields import at, objects_at
from agent.placement import Distances
from cni.pod_devices import ClaimReader
from deviceplugin.dra import allocated_claim
from deviceplugin.dra.allocated_claim import Allocation, Result
from deviceplugin.dra.attributes import BUS_ID, UUID

MOST_PODS = 8
"""Of a claim that several pods use, so many are asked for."""
MOST_CLAIMS = 8
"""Of a pod's other claims, so many are read."""

log = logging.getLogger(__name__)


class Objects(ClaimReader, Protocol):
    """Reads what the API server has."""

    def pod(self, pod: PodRef) -> Mapping[str, Any] | None:
        """Read a pod; None if there is none. Raises Unavailable."""

    def claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Read a claim, whatever its UID; None if there is none. Raises Unavailable."""

    def slices(self, driver: str) -> Sequence[Mapping[str, Any]]:
        """List this node's ResourceSlices of a driver. Raises Unavailable."""


@dataclass(frozen=True, slots=True)
class PodGpus:
    """As `Distances.gpus_of` gives them."""

    all: tuple[str, ...] = ()
    by_container: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Of those that device plugins gave."""


NO_GPUS = PodGpus()


class GpuAsker:
    """Finds out. Blocks, and may be used by many threads at once."""

    def __init__(self, kubelet: AsksKubelet, objects: Objects) -> None:
        self._kubelet = kubelet
        self._objects = objects

    def of(self, claim: Allocation, distances: Distances, own: Iterable[str] = ()) -> PodGpus:
        """Find the GPUs of the pod that a claim is for. `own` are names of resources that are GPUs by configuration."""
        if not distances.gpus or not claim.pods:
            return NO_GPUS
        pods = [pod for pod in claim.pods if pod.uid == claim.only_pod] or claim.pods[:MOST_PODS]
        by_container: Mapping[str, tuple[str, ...]] = {}
        for pod in pods:  # of a claim that several pods use, the first that has GPUs here
            by_container = by_container or self._of_plugins(pod, distances, frozenset(own))
        found = {uuid for uuids in by_container.values() for uuid in uuids} | self._of(claim.others, distances)
        if not found:
            own_driver = claim.results[0].driver  # its devices carry the UUID of a GPU that they are near to
            found = self._of((r for r in self._others(pods[0], claim) if r.driver != own_driver), distances)
        unnamed = sorted(place for gpus in by_container.values() for place in gpus if place not in distances.gpus)
        return PodGpus((*(uuid for uuid in distances.gpus if uuid in found), *unnamed), by_container)

    def _of_plugins(self, pod: PodRef, distances: Distances, own: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
        try:
            told = self._kubelet.pod(pod)
        except AgentError as error:
            log.warning("the GPUs of pod %s are not known, so its devices may be far from them: %s", pod, error)
            return {}
        found = {}
        for container in told.containers if told is not None else ():
            files = partial(self._kubelet.files, pod, container.name)
            mine = distances.gpus_of(container.units, own, container.numa_nodes, files)
            if mine:
                found[container.name] = mine
        return found

    def _of(self, results: Iterable[Result], distances: Distances) -> set[str]:
        """Find the GPUs among devices of other drivers."""
        found: set[str] = set()
        by_driver: dict[str, list[Result]] = {}
        for result in results:
            by_driver.setdefault(result.driver, []).append(result)
        for driver, mine in by_driver.items():
            devices = {(result.pool, result.device) for result in mine}
            try:
                named = [names for place, names in named_gpus(self._objects.slices(driver)) if place in devices]
            except AgentError as error:
                log.warning("which GPUs the devices of %s are is not known: %s", driver, error)
            else:
                found |= {uuid for names in named for name in names if (uuid := distances.gpu(name)) is not None}
        return found

    def _others(self, pod: PodRef, claim: Allocation) -> Iterator[Result]:
        """List what the pod's other claims have got."""
        try:
            document = self._objects.pod(pod) or {}
            names = [name for name in claim_names(document).values() if name != claim.ref.name]
            for name in names[:MOST_CLAIMS]:
                found = self._objects.claim(pod.namespace, name)
                if found is not None:
                    yield from allocated_claim.results_of(found)
        except (AgentError, ValueError) as error:
            log.warning("what pod %s has by other claims is not known: %s", pod, error)


def named_gpus(slices: Iterable[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """List (pool, device) of slices with what their attributes name a GPU by: UUIDs and PCI addresses.

    Raises Unavailable for what is no slice.
    """
    for document in slices:
        pool = at(document, "spec.pool.name", str)
        for device in objects_at(document, "spec.devices"):
            yield (pool, at(device, "name", str)), list(_names(at(device, "attributes", dict, {})))


def _names(attributes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for key, value in attributes.items():
        word, text = key.rpartition("/")[2], at(value, "string", str, "")
        if text and word in (UUID, BUS_ID):
            yield text.lower() if word == BUS_ID else text


_OF_CONTAINER = re.compile(r"container-([0-9]{1,4})-request-[0-9]{1,4}")


def container_of(request: str) -> int | None:
    """Tell the number of the container that a request of an extended resources' claim is for; init containers count
    first. The scheduler names them so."""
    found = _OF_CONTAINER.fullmatch(request)
    return int(found[1]) if found else None


def container_names(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """Name a pod's containers as the scheduler counts them. Raises Unavailable for what is no pod."""
    return tuple(at(container, "name", str) for container in _containers(pod))


def claim_names(pod: Mapping[str, Any]) -> Mapping[str, str]:
    """Map the names of a pod's claims, as its containers know them, to those of the ResourceClaims.

    Raises Unavailable for what is no pod.
    """
    told = objects_at(pod, "status.resourceClaimStatuses")
    made = {at(each, "name", str): at(each, "resourceClaimName", str, "") for each in told}
    named = {
        name: at(each, "resourceClaimName", str, "") or made.get(name, "")
        for each in objects_at(pod, "spec.resourceClaims")
        if (name := at(each, "name", str))
    }
    return {name: claim for name, claim in named.items() if claim}


def names_all_of(pod: Mapping[str, Any], claim: str) -> bool:
    """Tell whether each container that names a claim names all of it, none a request alone.

    Raises Unavailable for what is no pod.
    """
    own = {name for name, of in claim_names(pod).items() if of == claim}
    named = (entry for container in _containers(pod) for entry in objects_at(container, "resources.claims"))
    return not any(entry.get("request") for entry in named if entry.get("name") in own)


def _containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    return objects_at(pod, "spec.initContainers") + objects_at(pod, "spec.containers")


MOST_READ = 32
"""So many pods are read for a claim."""


class Allocations:
    """Reads claims, and what of them is ours. Blocks, and may be used by many threads at once."""

    def __init__(self, kubelet: AsksKubelet, objects: Objects, driver: str, pool: str) -> None:
        self._kubelet = kubelet
        self._objects = objects
        self._driver = driver
        self._pool = pool

    def of(self, ref: ClaimRef) -> Allocation:
        """Read a claim. Raises ClaimInvalid, Unavailable, and Refused without the right to read."""
        found = self._objects.get(ref)
        if found is None:
            raise ClaimInvalid(f"claim {ref} does not exist any more, or was made again")
        return allocated_claim.ours(found, ref, self._driver, self._pool)

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
            document = self._objects.pod(found.pod)
            if document is not None and _has(document, claim):
                yield replace(found.pod, uid=at(document, "metadata.uid", str))


def _has(pod: Mapping[str, Any], claim: Allocation) -> bool:
    group = at(pod, "spec.schedulingGroup.podGroupName", str, "")
    return group in claim.groups and claim.ref.name in claim_names(pod).values()
