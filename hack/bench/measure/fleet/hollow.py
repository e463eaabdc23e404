"""Agents without hardware and without kubelet: all that talks to the API server, and nothing else.

A hollow agent is the real publications (objects, comparison, pacing, watch of pods, HTTP client) on a modelled node
and pods that the benchmark makes up. The time is passed in; the HTTP is real.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry

from agent.cluster.apiserver import ApiServer, ObjectKind
from agent.cluster.publications import Publications
from agent.cluster.topology.node_view import Intervals, Node
from agent.config.topology import Topology
from agent.hardware.host import Host
from agent.kubelet.podresources import Allocatable, ContainerDevices, DeviceAssignment, PodDevices, PodResources
from agent.ledger import Ledger
from agent.model.allocation import Attachment, Hold, PodRef
from agent.model.device import Snapshot
from agent.offer.offer import Offer, Unit
from agent.process.conditions import Conditions
from agent.report.metrics import Metrics
from agent.state import Latest

NAMESPACE = "jobs"
WATCH_DEADLINE_SECONDS = 20.0

Units = Mapping[str, Sequence[Unit]]
T = TypeVar("T")


class Cluster:
    """The stand-in for the API server, as the benchmark drives it."""

    def __init__(self, port: int) -> None:
        self._port = port

    def counts(self) -> dict[str, int]:
        """Return what has been counted so far."""
        found: dict[str, int] = self._call("GET", "/_sim/counts")
        return found

    def put_pod(self, node: str, name: str, phase: str) -> None:
        """Create a pod, or change its phase."""
        self._call("PUT", "/_sim/pod", {"node": node, "namespace": NAMESPACE, "name": name, "phase": phase})

    def delete_pod(self, name: str) -> None:
        """Remove a pod."""
        self._call("DELETE", f"/_sim/pod/{NAMESPACE}/{name}")

    def _call(self, method: str, path: str, document: Any = None) -> Any:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request(method, path, None if document is None else json.dumps(document))
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{method} {path}: {answer.status} {body[:200]!r}")
            return json.loads(body)
        finally:
            connection.close()


class CountedApi(ApiServer):
    """The client, and how often it was asked."""

    reads = writes = 0

    def metadata(self, kind: ObjectKind, name: str) -> dict[str, Any]:
        """As the client's."""
        self.reads += 1
        return super().metadata(kind, name)

    def get(self, kind: ObjectKind, name: str) -> dict[str, Any] | None:
        """As the client's."""
        self.reads += 1
        return super().get(kind, name)

    def apply(self, kind: ObjectKind, document: Mapping[str, Any], *, force: bool) -> dict[str, Any]:
        """As the client's."""
        self.writes += 1
        return super().apply(kind, document, force=force)

    def create(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """As the client's."""
        self.writes += 1
        return super().create(path, document)


class NothingHeld:
    """Books of a node to whose pods CNI has brought nothing."""

    def holds(self) -> tuple[Hold, ...]:
        """List nothing."""
        return ()

    def attachments(self) -> tuple[Attachment, ...]:
        """List nothing."""
        return ()


class NoHardware:
    """A node without files."""

    root = Path("/nonexistent")


class HollowKubelet(PodResources):
    """PodResources of pods that hold one unit each."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))
        self.held: dict[str, tuple[str, str]] = {}
        """Pod → (resource name, unit ID); an empty unit for a pod without devices."""

    async def list(self) -> tuple[PodDevices, ...]:
        """List what the pods hold."""
        return tuple(
            PodDevices(PodRef(NAMESPACE, pod), (ContainerDevices("c", _assigned(resource, unit)),))
            for pod, (resource, unit) in self.held.items()
        )

    async def allocatable(self) -> Allocatable:
        """List nothing: both of kubelet's managers are off."""
        return Allocatable()


class HollowAgent:
    """One node's publications, stepped by whoever passes the time."""

    def __init__(
        self,
        name: str,
        kubeconfig: Path,
        config: Topology,
        snapshot: Snapshot,
        units: Units,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.kubelet = HollowKubelet()
        self.api = CountedApi.from_kubeconfig(kubeconfig)
        self.complaints: list[str] = []
        conditions = Conditions(self._note)
        self.phases: dict[str, str] = {}
        """Pod → phase, as the API server has it."""
        self.publications = Publications(
            config,
            Node(
                name,
                cast(Host, NoHardware()),
                Latest(snapshot),
                Latest(Offer(replace(snapshot, generation=1), {name: tuple(found) for name, found in units.items()})),
                self.kubelet,
                cast(Ledger, NothingHeld()),
                Latest({}),
            ),
            self.api,
            Metrics(CollectorRegistry()),
            conditions,
            Intervals(clock=clock),
        )

    def _note(self, _name: str, what: str | None) -> None:
        if what is not None:
            self.complaints.append(what)

    @property
    def writes(self) -> int:
        """How often this agent has asked for a write so far."""
        return self.api.writes

    def await_watch(self) -> None:
        """Wait until the watch has brought all that happened to the pods: no figure depends on how long that takes."""
        deadline = time.monotonic() + WATCH_DEADLINE_SECONDS
        while {pod.name: pod.phase for pod in self.publications.view.watched or ()} != self.phases:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: the watch of pods did not bring {self.phases}")
            time.sleep(0.001)

    def close(self) -> None:
        """End the watch and the connections."""
        self.publications.view.stop()
        self.api.close()


def _assigned(resource: str, unit: str) -> tuple[DeviceAssignment, ...]:
    return (DeviceAssignment(resource, (unit,)),) if unit else ()
