"""Which GPUs the pod of a claim has, whoever gave them: what its late-bound devices should be near to.

Asked in this order, and no further once there is an answer: kubelet, for units of any device plugin, and the claim
itself, for devices of other DRA drivers; then the pod's other claims. A driver tells in its ResourceSlices which GPU a
device is. A wrong or missing answer costs bandwidth, never the pod.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from agent.errors import AgentError, ClaimInvalid
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import PodDevices
from agent.model.allocation import PodRef
from agent.placement import Distances
from deviceplugin.dra import allocation, pod_facts
from deviceplugin.dra.allocation import Allocation, Result
from deviceplugin.dra.attributes import BUS_ID, UUID

MOST_PODS = 8
"""Of a claim that several pods use, so many are asked for."""
MOST_CLAIMS = 8
"""Of a pod's other claims, so many are read."""

log = logging.getLogger(__name__)


class Kubelet(Protocol):
    """Tells what device plugins gave to a pod, and which sandboxes live."""

    def pod(self, pod: PodRef) -> PodDevices | None:
        """Ask what a pod holds; None if kubelet does not know it. Raises Unavailable."""

    def pods(self) -> Sequence[PodDevices]:
        """Ask what every pod of the node holds. Raises Unavailable."""

    def files(self, pod: PodRef, container: str, resource_name: str) -> Sequence[str]:
        """List the device files that a resource's plugin gave to a container; none if that is not known."""

    def sandboxes(self) -> Sequence[Sandbox]:
        """List the runtime's sandboxes; none if it cannot be asked on this node. Raises Unavailable."""


class Objects(Protocol):
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

    def __init__(self, kubelet: Kubelet, objects: Objects) -> None:
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
            try:
                slices = self._objects.slices(driver)
            except AgentError as error:
                log.warning("which GPUs the devices of %s are is not known: %s", driver, error)
                continue
            devices = {(result.pool, result.device) for result in mine}
            names = [name for place, names in named_gpus(slices) if place in devices for name in names]
            found |= {uuid for name in names if (uuid := distances.gpu(name)) is not None}
        return found

    def _others(self, pod: PodRef, claim: Allocation) -> Iterator[Result]:
        """List what the pod's other claims have got."""
        try:
            document = self._objects.pod(pod) or {}
            names = [name for name in pod_facts.claim_names(document).values() if name != claim.ref.name]
            for name in names[:MOST_CLAIMS]:
                found = self._objects.claim(pod.namespace, name)
                if found is not None:
                    yield from allocation.results_of(found)
        except (AgentError, ClaimInvalid) as error:
            log.warning("what pod %s has by other claims is not known: %s", pod, error)


def named_gpus(slices: Iterable[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """List (pool, device) of slices with what their attributes name a GPU by: UUIDs and PCI addresses. Pure."""
    for document in slices:
        spec = document.get("spec")
        pool = spec.get("pool") if isinstance(spec, dict) else None
        devices = spec.get("devices") if isinstance(spec, dict) else None
        if not isinstance(pool, dict) or not isinstance(devices, list):
            continue
        for device in devices:
            if not isinstance(device, dict):
                continue
            attributes = device.get("attributes")
            if isinstance(attributes, dict):
                place = str(pool.get("name")), str(device.get("name"))
                yield place, list(_names(attributes))


def _names(attributes: Mapping[str, Any]) -> Iterator[str]:
    for key, value in attributes.items():
        text = value.get("string") if isinstance(value, dict) else None
        if isinstance(text, str) and key.rpartition("/")[2] in (UUID, BUS_ID):
            yield text.lower() if key.rpartition("/")[2] == BUS_ID else text
