"""The stand-in of kubelet with drivers whose claims do as a test tells them, and an API server in memory."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import shutil
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.errors import Unavailable
from agent.model.allocation import ClaimRef, Hold, Spec
from agent.process.backoff import Backoff
from agent.state import Latest
from deviceplugin.dra.registration import DEFAULT_TIMES, Door, Driver, Times
from deviceplugin.dra.services import ClaimService
from deviceplugin.server import unobserved
from hack.sim.dra.behaviour import Behaviour
from hack.sim.dra.cluster import ClusterFailed
from hack.sim.dra.drivers import DraCall
from hack.sim.kubelet import Kubelet
from hack.sim.pod_life import Pod, Timing
from hack.sim.pods import Container, PodClaim, PodSpec, UsedClaim
from hack.sim.runtime import CniRunner
from tests.awaiting import until

ReadClaim = Callable[[str, str], Mapping[str, Any] | None]
"""Reads a ResourceClaim by namespace and name."""


class DummyClaims:
    """Prepares claims."""

    def __init__(self, driver: str, read: ReadClaim) -> None:
        self.prepared: dict[str, int] = {}
        """How often each claim that is prepared was asked for, by UID."""
        self._driver = driver
        self._read = read
        self._guard = threading.Lock()

    def prepare(self, ref: ClaimRef) -> Sequence[Hold]:
        with self._guard:
            self.prepared[ref.uid] = self.prepared.get(ref.uid, 0) + 1
        document = self._read(ref.namespace, ref.name)
        if document is None:
            raise Unavailable(f"claim {ref} is gone")
        return tuple(self._device(ref, result) for result in _results(document) if result["driver"] == self._driver)

    def unprepare(self, ref: ClaimRef) -> None:
        with self._guard:
            self.prepared.pop(ref.uid, None)

    def _device(self, ref: ClaimRef, result: Mapping[str, Any]) -> Hold:
        return Hold(
            f"{ref.uid}-{result['device']}",
            "",
            spec=Spec(self._driver),
            request=result["request"].split("/")[0],
            pool=result["pool"],
            device_name=result["device"],
            share_id=result.get("shareID") or "",
        )


def dummy_door(claims: DummyClaims, driver: str, node: str, kubelet_dir: Path, times: Times = DEFAULT_TIMES) -> Door:
    """Make the door through which kubelet finds a dummy driver."""
    return Door(Driver(driver, node, kubelet_dir), ClaimService(driver, claims, unobserved), Latest(()), times)


def _results(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = document["status"]["allocation"]["devices"]["results"]
    return found


NODE = "node-1"
NIC_DRIVER, GPU_DRIVER = "nodefabric.io", "gpu.nvidia.com"
NIC, GPU = ("nic", NIC_DRIVER, "vf-1"), ("gpu", GPU_DRIVER, "gpu-0")
QUICK = replace(Behaviour().times(0.02), retry=(0.1, 0.2), call=45.0, reconcile=3600.0, wipe=3600.0)
TIMES = Times(poll=0.02, retry=Backoff(0.02, 0.1), last_words=0.2, grace=0.1)


class MemoryCluster:
    """Claims in a dictionary."""

    def __init__(self) -> None:
        self.claims: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.away = False
        self.doors: dict[str, Door] = {}

    def claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        if self.away:
            raise ClusterFailed("the API server is away")
        return copy.deepcopy(self.claims.get((namespace, name)))

    def wipe(self, driver: str) -> None:
        if self.away:
            raise ClusterFailed("the API server is away")

    def allocate(
        self, name: str, *results: tuple[str, str, str], users: Iterable[str], owner: str = "", uid: str = ""
    ) -> str:
        """Make a claim with results (request, driver, device), reserved for pods. Returns its UID."""
        uid = uid or str(uuid.uuid4())
        metadata: dict[str, Any] = {"name": name, "namespace": "default", "uid": uid}
        if owner:
            metadata["ownerReferences"] = [{"kind": "Pod", "uid": owner, "controller": True}]
        self.claims["default", name] = {
            "metadata": metadata,
            "status": {
                "reservedFor": [{"resource": "pods", "uid": user} for user in users],
                "allocation": {
                    "devices": {
                        "results": [
                            {"request": request, "driver": driver, "pool": NODE, "device": device}
                            for request, driver, device in results
                        ]
                    }
                },
            },
        }
        return uid


class Node:
    """A kubelet with its folder, cluster and drivers."""

    def __init__(self, folder: Path, behaviour: Behaviour, runner: CniRunner | None, seed: int) -> None:
        self.folder = folder
        self.cluster = MemoryCluster()
        self.drivers: dict[str, DummyClaims] = {}
        self.doors = self.cluster.doors
        self._running: dict[str, asyncio.Future[None]] = {}
        self.kubelet = Kubelet(
            folder,
            netns_dir=folder / "netns",
            runner=runner,
            status_dir=folder / "status",
            seed=seed,
            timing=Timing(poll=0.02, sandbox_retry=0.1, later_delete=0.05, garbage=2.0),
            cluster=self.cluster,
            behaviour=behaviour,
        )

    def calls(self, *names: str) -> list[DraCall]:
        """List what drivers were asked by the kubelet that runs now."""
        assert self.kubelet.dra is not None
        return [call for call in self.kubelet.dra.calls if call.name in names]

    async def serve(self, driver: str) -> DummyClaims:
        """Serve a driver, and wait until it is registered."""
        claims = self.drivers.setdefault(driver, DummyClaims(driver, self.cluster.claim))
        door = self.doors[driver] = dummy_door(claims, driver, NODE, self.folder, TIMES)
        self._running[driver] = asyncio.ensure_future(door.run())
        await until(lambda: door.registered)
        return claims

    async def end(self, driver: str) -> None:
        """End a driver."""
        self.doors.pop(driver).close()
        await self._running.pop(driver)

    async def close(self) -> None:
        await self.kubelet.close()
        for driver in list(self.doors):
            await self.end(driver)

    async def running(self, spec: PodSpec) -> Pod:
        """Start a pod, and wait for its containers."""
        pod = self.kubelet.create(spec)
        await until(lambda: pod.phase == "Running")
        return pod


@contextlib.asynccontextmanager
async def node(behaviour: Behaviour = QUICK, runner: CniRunner | None = None, seed: int = 1) -> AsyncIterator[Node]:
    """A node whose kubelet runs; its path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="nf-"))
    try:
        made = Node(folder, behaviour, runner, seed)
        await made.kubelet.start()
        try:
            yield made
        finally:
            await made.close()
    finally:
        shutil.rmtree(folder)


def pod(name: str, claim: str, *used: UsedClaim, uid: str = "", from_template: bool = False) -> PodSpec:
    """A pod with one claim, called `rails` in its spec, and a container for each use of it."""
    containers = tuple(Container(f"c{number}", claims=(use,)) for number, use in enumerate(used))
    return PodSpec(
        "default",
        name,
        containers=containers or (Container("c0"),),
        uid=uid or f"uid-of-{name}",
        claims=(PodClaim("rails", claim, from_template),),
    )
