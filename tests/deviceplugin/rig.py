"""Device plugins and a kubelet stand-in, face to face over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from agent.config import Config, HealthSettings, Resource
from agent.edits.build import GpuFiles
from agent.edits.device_info import GrantedFiles
from agent.edits.specs import Specs
from agent.edits.unit_specs import UnitSpecs
from agent.health_history import HealthHistory
from agent.ledger import Ledger
from agent.model.device import Snapshot
from agent.offer.offer import Offer, Unit
from agent.process.backoff import Backoff
from agent.report.metrics import Metrics
from agent.state import Latest
from deviceplugin.allocation import Allocator
from deviceplugin.grant_records import GrantRecords
from deviceplugin.plugins import DevicePlugins, Ground
from deviceplugin.registration import Times
from deviceplugin.server import Observe, unobserved
from hack.sim.kubelet import Kubelet
from hack.sim.plugins import Call
from hack.sim.pods import Container, PodSpec
from tests.awaiting import until
from tests.node import node

T = TypeVar("T")
RESOURCES = (
    Resource("rdma/hca", "hca", shares=4),
    Resource("rdma/vf", "vf"),
    Resource("nvidia.com/gpu", "gpu"),
)
VF_ONLY = (Resource("rdma/vf", "vf"),)
QUICK = Times(poll=0.02, retry=Backoff(0.02, 0.2), register=20.0, stream=20.0)
"""Kubelet has its time on a busy machine: tests count registrations."""


@dataclass
class Rig:
    folder: Path
    kubelet: Kubelet
    config: Latest[Config]
    snapshot: Latest[Snapshot]
    ledger: Ledger
    plugins: DevicePlugins

    @property
    def units(self) -> Mapping[str, tuple[Unit, ...]]:
        """Every resource's units as offered now, to whomever."""
        return self.plugins.allocator.offer.value.offered

    def socket(self, resource: str = "rdma/vf") -> str:
        """Name the socket that a resource is served on."""
        return self.plugins.status()[resource].socket

    def calls(self, *names: str) -> list[Call]:
        """List the calls of some names, oldest first."""
        return [c for c in self.kubelet.registry.calls if c.name in names]

    def allocatable(self) -> dict[str, int]:
        return self.kubelet.devices.allocatable()

    def publish(self, snapshot: Snapshot) -> None:
        """Make a snapshot the newest."""
        self.snapshot.set(replace(snapshot, generation=self.snapshot.value.generation + 1))

    async def reconfigure(self, *resources: Resource) -> None:
        """Offer by another configuration, and wait for its lists."""
        self.config.set(replace(self.config.value, resources=resources))
        await self.plugins.reconfigured()

    async def run_pod(self, name: str, *containers: Container, init: tuple[Container, ...] = ()) -> dict[str, Any]:
        """Create a pod and wait until it runs or has failed."""
        pod = self.kubelet.create(PodSpec("default", name, (), init, containers))
        await until(lambda: pod.phase != "Pending")
        return self.kubelet.describe(pod)


@contextlib.asynccontextmanager
async def rig(
    folder: Path,
    *,
    snapshot: Snapshot | None = None,
    resources: tuple[Resource, ...] = RESOURCES,
    seed: int = 1,
    book: Ledger | None = None,
    observe: Observe = unobserved,
    health: HealthHistory | None = None,
    gpu_files: Callable[[], GpuFiles] = GpuFiles,
    files_seconds: float = 0.1,
) -> AsyncIterator[Rig]:
    """Start both sides and wait until kubelet knows all units."""
    kubelet = new_kubelet(folder, seed)
    await kubelet.start()
    found = Latest(snapshot or node())
    ledger = Ledger.open(folder / "ledger.db", "boot")
    config = Latest(Config(resources=resources, kubelet_dir=folder, cdi_dir=folder / "cdi"))
    plugins = plugins_on(
        config,
        Ground(found, book or ledger, health or all_counts(), gpu_files, files_seconds),
        observe=observe,
    )
    running = asyncio.create_task(plugins.run())
    try:
        await until(lambda: running.done() or (plugins.ready and knows_all(kubelet, plugins)))
        yield Rig(folder, kubelet, config, found, ledger, plugins)
        await plugins.close()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await kubelet.close()
        ledger.close()


def all_counts() -> HealthHistory:
    """Remember nothing: every fact counts at once."""
    return HealthHistory(HealthSettings(0, 0, 0))


def plugins_on(config: Latest[Config], ground: Ground, *, observe: Observe = unobserved) -> DevicePlugins:
    """Make device plugins with an allocator of their own."""
    offer = Latest(Offer())
    files = GrantedFiles(config.value.cdi_dir.with_name("devinfo"))
    specs = Specs(ground.ledger, config.value.cdi_dir)
    units = UnitSpecs(ground.ledger, specs, Latest(True))
    records = GrantRecords(ground.ledger, files, offer, specs, units)
    allocator = Allocator(offer, records.grant, ground.ledger.pod_of)
    return DevicePlugins(config, ground, allocator, records, observe, QUICK)


def timed(metrics: Metrics) -> dict[tuple[str, str, str], float]:
    """Count the calls of kubelet's that were timed, by operation, resource and outcome."""
    (family,) = [f for f in metrics.registry.collect() if f.name == "nodefabric_rpc_duration_milliseconds"]
    counts = [sample for sample in family.samples if sample.name.endswith("_count")]
    return {(s.labels["operation"], s.labels["resource"], s.labels["outcome"]): s.value for s in counts}


def knows_all(kubelet: Kubelet, plugins: DevicePlugins) -> bool:
    return kubelet.devices.capacity() == {
        name: len(units) for name, units in plugins.allocator.offer.value.offered.items()
    }


def new_kubelet(folder: Path, seed: int = 1) -> Kubelet:
    return Kubelet(folder, netns_dir=folder / "netns", seed=seed)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine, and fail the test for a task that died unseen."""
    unseen: list[str] = []

    async def watched() -> T:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(
            lambda _, context: unseen.append(f"{context['message']}: {context.get('exception')}")
        )
        return await work

    result = asyncio.run(watched())
    assert unseen == []
    return result
