"""NodeResourceTopologyMatch tries a refused pod again only when the object is written, and believes it only later.

Its cache takes an object over at its next round (`cacheResyncPeriodSeconds`), up to 5 s after the write. Without
another write, a pod that fits by then waits until kube-scheduler flushes its queue, after 5 minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent.cluster.topology.node_view import Intervals
from agent.config.topology import Fingerprint, Topology
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, PodDevices
from agent.model.allocation import PodRef
from hack.sim.cluster.apiserver import ApiServerStandIn
from tests.agent.cluster.publications import Rig

RESYNC = 5


class Scheduler:
    """What the plugin does of all this, second by second."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.cached = self.free()
        self.version = self.stored_version()
        self.events: list[int] = []
        self.bound_at: int | None = None

    def stored_version(self) -> str | None:
        found: str | None = self.rig.stored().get("metadata", {}).get("resourceVersion")
        return found

    def free(self) -> int:
        return sum(map(int, self.rig.available()))

    def pass_second(self, second: int) -> None:
        if self.stored_version() != self.version:
            self.version = self.stored_version()
            self.events.append(second)
            if self.cached and self.bound_at is None:
                self.bound_at = second
        if second % RESYNC == 0:
            self.cached = self.free()


class Scene:
    """One agent with its four VFs, a cluster, and seconds that pass at once."""

    def __init__(self, folder: Path, server: ApiServerStandIn, config: Topology) -> None:
        self.now = 0
        self.folder, self.server, self.config = folder, server, config
        self.rig = self.start()
        self.scheduler = Scheduler(self.rig)

    def start(self) -> Rig:
        rig = Rig(self.folder, self.config, server=self.server, intervals=Intervals(shared=0.0, clock=lambda: self.now))
        rig.publications.view.watch_pods()
        return rig

    def hold(self, *units: str) -> None:
        held = DeviceAssignment("rdma/vf", units)
        self.rig.kubelet.pods = (PodDevices(PodRef("ns", "a"), (ContainerDevices("c", (held,)),)),) if units else ()
        self.rig.publications.changed()

    def pass_time(self, seconds: int) -> None:
        async def scenario() -> None:
            for _ in range(seconds):
                await self.rig.publications.step(self.now)
                self.scheduler.pass_second(self.now)
                self.now += 1

        asyncio.run(scenario())


@contextmanager
def scene(folder: Path, **keys: Any) -> Iterator[Scene]:
    config = Topology(publish=True, start_spread_seconds=0, fingerprint=Fingerprint("podresources"), **keys)
    with ApiServerStandIn() as server:
        server.state.add_node("worker-1")
        made = Scene(folder, server, config)
        try:
            yield made
        finally:
            made.rig.client.close()


def test_a_pod_that_fits_is_bound_soon_after_another_has_ended(tmp_path: Path) -> None:
    with scene(tmp_path) as it:
        it.hold("u0", "u1", "u2", "u3")
        it.pass_time(101)
        assert it.scheduler.cached == 0
        it.hold()
        it.pass_time(20)
        assert it.scheduler.bound_at is not None, "a pod that fits waits for 5 minutes: nothing is written any more"


def test_a_cluster_without_that_scheduler_turns_it_off(tmp_path: Path) -> None:
    with scene(tmp_path, settle_seconds=0) as it:
        it.hold("u0")
        it.pass_time(100)
        assert len(it.scheduler.events) == 1
        assert "annotations" not in it.rig.stored()["metadata"]
