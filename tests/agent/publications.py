"""One agent's publications, with a node and a cluster around them, over real HTTP."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from agent.clients.apiserver import ApiServer
from agent.clients.kubelet import Allocatable, PodDevices
from agent.config.topology import Fingerprint, Topology
from agent.errors import Unavailable
from agent.hardware import sysfs
from agent.metrics import Metrics
from agent.model.counters import VfCounters
from agent.model.device import Snapshot
from agent.publication import Publications
from agent.sim import recorded
from agent.sim.apiserver import ApiServerStandIn
from agent.sim.definitions import Definition
from tests.agent.topology.two_sockets import FakeUnit

QUICK = Topology(
    publish=True,
    coalesce_seconds=0.02,
    heartbeat_seconds=600,
    start_spread_seconds=0,
    fingerprint=Fingerprint("dedicated"),
)
"""With the watch of pods, which is more than the default."""


class FakeInventory:
    """Hardware that the test changes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = replace(snapshot, generation=1)
        self._changed = asyncio.Event()

    def change(self, snapshot: Snapshot) -> None:
        self.snapshot = replace(snapshot, generation=self.snapshot.generation + 1)
        self._changed.set()

    async def newer_than(self, generation: int) -> Snapshot:
        while self.snapshot.generation <= generation:
            await self._changed.wait()
            self._changed.clear()
        return self.snapshot


class FakeKubelet:
    """Pods as the test says."""

    def __init__(self) -> None:
        self.pods: tuple[PodDevices, ...] = ()
        self.failing = False
        self.lists = 0

    async def list(self) -> tuple[PodDevices, ...]:
        self.lists += 1
        if self.failing:
            raise Unavailable("kubelet is away")
        return self.pods

    async def allocatable(self) -> Allocatable:
        return Allocatable()


@cache
def h100() -> Snapshot:
    with tempfile.TemporaryDirectory() as folder:
        recorded.unpack(recorded.load(Path("tests/nodes/h100-8gpu.json")), Path(folder))
        return sysfs.scan(Path(folder))


class Rig:
    """An agent's publications, with a node and a cluster around them."""

    def __init__(
        self,
        folder: Path,
        config: Topology,
        *,
        known: Iterable[Definition] | None = None,
        api: bool = True,
        hardware: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot,
        root: Path | None = None,
        server: ApiServerStandIn | None = None,
        vf_counters: Callable[[Snapshot], tuple[VfCounters, ...]] = lambda snapshot: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hardware` changes what the node has; `server` is a cluster that is there already, and stays."""
        self.root = root or folder
        self.inventory = FakeInventory(hardware(h100() if root is None else sysfs.scan(root)))
        self.kubelet = FakeKubelet()
        self.units = {"rdma/vf": tuple(FakeUnit(f"u{n}", n % 2) for n in range(4))}
        self.is_offered = True
        self.stays = server is not None
        self.server = server or ApiServerStandIn(known=known, bookmark_seconds=0.1)
        (folder / "kubeconfig").write_text(self.server.kubeconfig())
        self.client = ApiServer.from_kubeconfig(folder / "kubeconfig")
        self.registry = CollectorRegistry()
        self.complaints: list[str | None] = []
        (folder / "config.yaml").write_text("topologyManagerPolicy: single-numa-node\n")
        self.publications = Publications(
            replace(config, kubelet_config=folder / "config.yaml"),
            "worker-1",
            self.root,
            self.inventory,
            self.kubelet,
            lambda: self.units if self.is_offered else None,
            Metrics(self.registry),
            self.client if api else None,
            self.complaints.append,
            vf_counters=vf_counters,
            clock=clock,
        )

    async def __aenter__(self) -> Rig:
        self.task = asyncio.create_task(self.publications.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        self.client.close()
        if not self.stays:
            await asyncio.to_thread(self.server.close)

    def stored(self, kind: str = "NodeResourceTopology") -> dict[str, Any]:
        return self.server.state.get(kind, "worker-1") or {}

    def fingerprint(self) -> str | None:
        found = {item["name"]: item["value"] for item in self.stored().get("attributes", ())}
        return found.get("nodeTopologyPodsFingerprint")

    def available(self) -> list[str]:
        zones = self.stored().get("zones", ())
        return [r["available"] for zone in zones for r in zone["resources"] if r["name"] == "rdma/vf"]

    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.stored("Node").get("metadata", {}).get("labels", {})
        return found
