"""A publisher, with an API and a node's content that the test makes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from agent.cluster.apiserver import TOPOLOGY, ApiServer, ObjectKind
from agent.cluster.topology.publisher import Problems, Publication, Publisher, Times
from agent.errors import Conflicted, Unavailable
from agent.process.backoff import Backoff
from agent.process.conditions import Conditions
from agent.report.metrics import Metrics

QUICK = Times(coalesce=0.02, heartbeat=60, refresh=60, start_spread=0, retry=Backoff(0.01, 0.05))
SLOW = Times(coalesce=2, heartbeat=600, refresh=10, start_spread=30, retry=Backoff(1, 300))
DOCUMENT = {
    "apiVersion": "topology.node.k8s.io/v1alpha2",
    "kind": "NodeResourceTopology",
    "metadata": {"name": "worker-1"},
    "zones": [],
}
CHANGED = {**DOCUMENT, "zones": [{"name": "node-0", "type": "Node"}]}


class FakeApi(ApiServer):
    """Keeps what was applied; raises what it is told to."""

    def __init__(self) -> None:
        self.applied: list[Mapping[str, Any]] = []
        self.forced: list[bool] = []
        self.gets = 0
        self.calls = 0
        self.failing: Exception | None = None
        self.is_mute = False
        """It does what it is asked, and its answers do not arrive."""
        self.unreadable: Exception | None = None
        self.stored: dict[str, Any] | None = None
        self.owner: tuple[str, str] | None = None
        """(field, manager) of another writer, met unless forced or left out."""

    def get(self, kind: ObjectKind, name: str) -> dict[str, Any] | None:
        self.gets += 1
        if self.unreadable is not None:
            raise self.unreadable
        return self.stored

    def apply(self, kind: ObjectKind, document: Mapping[str, Any], *, force: bool) -> dict[str, Any]:
        self.calls += 1
        if self.failing is not None:
            raise self.failing
        if self.owner is not None and not force and self._touches(document, self.owner[0]):
            raise Conflicted("PATCH: 409", [self.owner])
        self.applied.append(document)
        self.forced.append(force)
        self.stored = dict(document)
        if self.is_mute:
            raise Unavailable("timed out")
        return self.stored

    @staticmethod
    def _touches(document: Mapping[str, Any], field: str) -> bool:
        found: Any = document
        for key in field.split(".", 3)[1:]:
            if key not in found:
                return False
            found = found[key]
        return True


class Node(Publication):
    """A publication whose content the test changes."""

    kind = TOPOLOGY

    def __init__(self, content: Mapping[str, Any] = DOCUMENT) -> None:
        self.document: Mapping[str, Any] | None = content
        self.built = 0
        self.failing: Exception | None = None

    async def content(self) -> Mapping[str, Any] | None:
        self.built += 1
        if self.failing is not None:
            raise self.failing
        return self.document


class Rig:
    """A publisher with all around it."""

    def __init__(self, api: ApiServer, node: Node, times: Times = QUICK) -> None:
        self.registry = CollectorRegistry()
        self.complaints: list[str | None] = []
        self.publisher = Publisher(
            node,
            api,
            Metrics(self.registry),
            times,
            Problems(Conditions(self._note)),
        )
        self.publisher.chance = lambda: 0.5

    def _note(self, _name: str, what: str | None) -> None:
        self.complaints.append(what)

    @property
    def problem(self) -> str | None:
        return self.complaints[-1] if self.complaints else None

    async def __aenter__(self) -> Rig:
        self.task = asyncio.create_task(self.publisher.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    def writes(self, outcome: str) -> float:
        labels = {"object": "NodeResourceTopology", "outcome": outcome}
        return self.registry.get_sample_value("nodefabric_api_writes_total", labels) or 0

    def pass_time(self, start: float, end: float) -> list[float]:
        """Let the time pass, and return the moments at which the publisher did something."""

        async def scenario() -> list[float]:
            now, moments = start, []
            while now <= end:
                moments.append(now)
                now = await self.publisher.step(now)
            return moments

        return asyncio.run(scenario())
