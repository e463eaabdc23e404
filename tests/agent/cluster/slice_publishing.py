"""Slices as they are handed to a publisher, and one at a stand-in for the API server."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agent.cluster.apiserver import ApiServer
from agent.cluster.slices import Pool, SliceCells, SlicePublisher, SliceTimes
from agent.process.backoff import Backoff
from agent.state import Latest
from hack.sim.cluster.apiserver import ApiServerStandIn
from hack.sim.cluster.kinds import SLICE, Target
from tests.awaiting import until
from tests.node import new_report

DOWN: Mapping[str, str] = {"key": "nodefabric.io/LinkDown", "effect": "NoSchedule"}


def pool_slice(number: int, count: int, devices: Sequence[str], resource: str = "rdma/vf") -> dict[str, Any]:
    """One slice of so many."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{number}"},
        "spec": {
            "driver": "nodefabric.io",
            "nodeName": "n",
            "pool": {"name": "n", "resourceSliceCount": count},
            "devices": [{"name": name, "attributes": {"resource": {"string": resource}}} for name in devices],
        },
    }


def pool(count: int, resource: str = "rdma/vf") -> tuple[dict[str, Any], ...]:
    """A whole pool: slice i has the device vf-i."""
    return tuple(pool_slice(number, count, [f"vf-{number}"], resource) for number in range(count))


def tainted(document: dict[str, Any], device: str, taint: Mapping[str, str]) -> dict[str, Any]:
    """The slice with one more taint."""
    found = copy.deepcopy(document)
    for one in found["spec"]["devices"]:
        if one["name"] == device:
            one.setdefault("taints", []).append(dict(taint))
    return found


OURS = Pool("nodefabric.io", "n")
QUICK = SliceTimes(
    fault=0.02,
    structure=0.1,
    link_jitter=0.0,
    heal=0.1,
    released=0.6,
    look=0.05,
    retry=Backoff(0.05, 0.1),
)
QUIET_SECONDS = 0.4


class Rig:
    """A publisher with its cells, and what is at the server."""

    def __init__(self, server: ApiServerStandIn, api: ApiServer, times: SliceTimes = QUICK) -> None:
        self.server = server
        self.api = api
        self.slices: Latest[Any] = Latest(None)
        self.dropped: Latest[frozenset[str]] = Latest(frozenset())
        self.published: Latest[int | None] = Latest(None)
        cells = SliceCells(self.slices, self.dropped, self.published)
        report = new_report()
        self.conditions, self.events = report.conditions, report.events
        self.publisher = SlicePublisher(self.api, OURS, cells, report, times)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Rig]:
        task = asyncio.create_task(self.publisher.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @asynccontextmanager
    async def stepping(self) -> AsyncIterator[Rig]:
        """For a test that calls the publisher's `step` itself, with times of its own: none passes by itself."""
        self.publisher._watch.start()
        try:
            yield self
        finally:
            self.publisher._watch.stop()

    @property
    def writes(self) -> int:
        return self.server.state.counts.applies

    def stored(self) -> dict[str, dict[str, Any]]:
        items = self.server.state.listed(Target(SLICE), {"spec.driver": OURS.driver, "spec.nodeName": "n"})[1]
        return {item["metadata"]["name"]: item["spec"] for item in items}

    def generations(self) -> list[int]:
        return [spec["pool"]["generation"] for _, spec in sorted(self.stored().items())]

    async def publishes(self, documents: Any) -> None:
        """Hand these over, and wait until they are at the server."""
        self.slices.set(documents)
        await until(lambda: self.stored().keys() == {d["metadata"]["name"] for d in documents})
        await until(lambda: [s["devices"] for s in self.stored().values()] == [d["spec"]["devices"] for d in documents])

    async def watched(self, count: int) -> None:
        """Wait until the publisher's watch has heard of so many slices, and no more."""
        await until(lambda: (state := self.publisher._watch.state) is not None and len(state[0]) == count)

    async def quiet(self) -> None:
        """Assert that nothing is written any more."""
        before = self.server.state.counts
        await asyncio.sleep(QUIET_SECONDS)
        after = self.server.state.counts
        assert (after.applies, after.deletes) == (before.applies, before.deletes)
