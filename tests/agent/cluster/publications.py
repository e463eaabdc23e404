"""One agent's publications, with a node and a cluster around them, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from agent.cluster.apiserver import ApiServer
from agent.cluster.publications import Publications
from agent.cluster.topology.node_view import Intervals, Node
from agent.config.topology import Topology
from agent.errors import Unavailable
from agent.hardware.host import Host
from agent.hardware.sysfs import scan as sysfs
from agent.kubelet.podresources import Allocatable, PodDevices, PodResources
from agent.ledger import Ledger
from agent.model.allocation import Hold
from agent.model.counters import Counters, VfCounters
from agent.model.device import Snapshot
from agent.offer.offer import Offer, Unit
from agent.process.conditions import Conditions
from agent.report.metrics import Metrics
from agent.state import Latest
from hack.sim.cluster.apiserver import ApiServerStandIn
from hack.sim.cluster.definitions import Definition
from tests.agent.cluster.topology.nodes import offered
from tests.node import recorded_node

QUICK = Topology(publish=True, heartbeat_seconds=600, start_spread_seconds=0)
BRISK = Intervals(coalesce=0.02, shared=0.01, rest=0.05)


NOTHING_HELD: Mapping[str, str] = MappingProxyType({})


class FakeKubelet(PodResources):
    """Pods as the test says."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))
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


class FakeHost:
    """Files below a root, and what PFs count of their VFs."""

    def __init__(self, root: Path, vf_counters: Callable[[], tuple[VfCounters, ...]] = tuple) -> None:
        self.root = root
        self._vf_counters = vf_counters

    def counters(self, snapshot: Snapshot, held: Set[str]) -> Counters:
        return Counters((), self._vf_counters())


class FakeBooks:
    """Books of devices in pods by CNI: PCI address → name in the host."""

    def __init__(self, held: Mapping[str, str]) -> None:
        self.held = held

    def holds(self) -> tuple[Hold, ...]:
        return ()

    def attachments(self) -> tuple[Any, ...]:
        return tuple(
            SimpleNamespace(device=device, undo=SimpleNamespace(netdev=name)) for device, name in self.held.items()
        )


def node_of(
    snapshot: Latest[Snapshot],
    *,
    kubelet: PodResources | None = None,
    host: FakeHost | None = None,
    held: Mapping[str, str] = NOTHING_HELD,
) -> Node:
    """Put a node together that has no offer yet."""
    return Node(
        "worker-1",
        cast(Host, host or FakeHost(Path("/"))),
        snapshot,
        Latest(Offer()),
        kubelet or FakeKubelet(),
        cast(Ledger, FakeBooks(held)),
        Latest({}),
    )


def h100() -> Snapshot:
    """The 8-GPU node, before NVML has answered."""
    return replace(recorded_node("h100-8gpu"), gpus=())


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
        vf_counters: Callable[[], tuple[VfCounters, ...]] = tuple,
        held: Mapping[str, str] = NOTHING_HELD,
        intervals: Intervals = BRISK,
    ) -> None:
        """`hardware` changes what the node has; `server` is a cluster that is there already, and stays."""
        self.root = root or folder
        self.snapshot = Latest(replace(hardware(h100() if root is None else sysfs.scan(root)), generation=1))
        self.kubelet = FakeKubelet()
        self.stays = server is not None
        self.server = server or ApiServerStandIn(known=known, bookmark_seconds=0.1)
        (folder / "kubeconfig").write_text(self.server.kubeconfig())
        self.client = ApiServer.from_kubeconfig(folder / "kubeconfig")
        self.registry = CollectorRegistry()
        self.complaints: list[str | None] = []
        (folder / "config.yaml").write_text("topologyManagerPolicy: single-numa-node\n")
        host = FakeHost(self.root, vf_counters)
        self.node = node_of(self.snapshot, kubelet=self.kubelet, host=host, held=held)
        self.offer({"rdma/vf": tuple(offered(f"u{n}", n % 2) for n in range(4))})
        self.publications = Publications(
            replace(config, kubelet_config=folder / "config.yaml"),
            self.node,
            self.client if api else None,
            Metrics(self.registry),
            Conditions(self._note),
            intervals,
        )

    def offer(self, units: Mapping[str, tuple[Unit, ...]]) -> None:
        """Make another offer."""
        self.node.offer.set(Offer(Snapshot(generation=1), units))

    def _note(self, _name: str, what: str | None) -> None:
        self.complaints.append(what)

    def change(self, snapshot: Snapshot) -> None:
        """Make a snapshot the newest."""
        self.snapshot.set(replace(snapshot, generation=self.snapshot.value.generation + 1))

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
