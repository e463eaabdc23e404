"""Agents without hardware and without kubelet: all that talks to the API server, and nothing else.

A hollow agent is the real publications (objects, comparison, pacing, watch of pods, HTTP client) on a recorded node
and pods that the benchmark makes up. The time is passed in; the HTTP is real.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from agent.clients.apiserver import ApiServer, ObjectKind
from agent.clients.kubelet import Allocatable, ContainerDevices, DeviceAssignment, PodDevices
from agent.config.topology import Topology
from agent.metrics import Metrics
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from agent.model.unit import OfferedUnit
from agent.publication import Publications

NAMESPACE = "jobs"
WATCH_DEADLINE_SECONDS = 20.0

Units = Mapping[str, Sequence[OfferedUnit]]
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


class CountedApi:
    """The real client, and how often it was asked."""

    def __init__(self, client: ApiServer) -> None:
        self._client = client
        self.reads = self.writes = 0

    def metadata(self, kind: ObjectKind, name: str) -> dict[str, Any]:
        """As the client's."""
        self.reads += 1
        return self._client.metadata(kind, name)

    def get(self, kind: ObjectKind, name: str) -> dict[str, Any] | None:
        """As the client's."""
        self.reads += 1
        return self._client.get(kind, name)

    def apply(self, kind: ObjectKind, document: Mapping[str, Any], *, force: bool) -> dict[str, Any]:
        """As the client's."""
        self.writes += 1
        return self._client.apply(kind, document, force=force)

    def create(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """As the client's."""
        self.writes += 1
        return self._client.create(path, document)

    def list_pods(self, node_name: str, read: Callable[[dict[str, Any]], T]) -> tuple[str, list[T]]:
        """As the client's."""
        return self._client.list_pods(node_name, read)

    def watch_pods(self, node_name: str, since: str, seconds: int) -> Iterator[dict[str, Any]]:
        """As the client's."""
        return self._client.watch_pods(node_name, since, seconds)


class StillHardware:
    """A node that stays as it is."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    async def newer_than(self, generation: int) -> Snapshot:
        raise AssertionError("a hollow agent is stepped, not run")


class HollowKubelet:
    """PodResources of pods that hold one unit each."""

    def __init__(self) -> None:
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
        self.client = ApiServer.from_kubeconfig(kubeconfig)
        self.api = CountedApi(self.client)
        self.complaints: list[str] = []
        self.phases: dict[str, str] = {}
        """Pod → phase, as the API server has it."""
        self.publications = Publications(
            config,
            name,
            Path("/nonexistent"),
            StillHardware(snapshot),
            self.kubelet,
            lambda: units,
            Metrics(CollectorRegistry()),
            self.api,
            lambda what: self.complaints.append(what) if what is not None else None,
            clock,
        )

    @property
    def writes(self) -> int:
        """How often this agent has asked for a write so far."""
        return self.api.writes

    def await_watch(self) -> None:
        """Wait until the watch has brought all that happened to the pods: no figure depends on how long that takes."""
        deadline = time.monotonic() + WATCH_DEADLINE_SECONDS
        while {pod.name: pod.phase for pod in self.publications.watched or ()} != self.phases:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: the watch of pods did not bring {self.phases}")
            time.sleep(0.001)

    def close(self) -> None:
        """End the watch and the connections."""
        self.publications.stop()
        self.client.close()


def _assigned(resource: str, unit: str) -> tuple[DeviceAssignment, ...]:
    return (DeviceAssignment(resource, (unit,)),) if unit else ()
