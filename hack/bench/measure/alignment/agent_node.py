"""The device plugins and the kubelet stand-in on one node, joined by real sockets, and late binding beside them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from agent import cdi
from agent.clients.kubelet import PodDevices, PodResources
from agent.config import Config
from agent.late.binder import Binder
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from agent.sim.kubelet import Kubelet
from agent.sim.pods import Container, PodSpec
from cni.call import Call
from cni.netconf import from_document
from deviceplugin.plugins import DevicePlugins
from measure.alignment.scenarios import GPU, NIC, Scenario
from measure.alignment.score import Chance
from measure.alignment.stream import Step

NAMESPACE = "default"
CONTAINER = "c"
PAUSE_SECONDS = 60.0
"""Between two steps, by the plugins' clock."""
AT_ONCE_SECONDS = 0.02
"""Between two pods that come right one after the other."""
DEADLINE_SECONDS = 30.0


class _Still:
    """An inventory that never changes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    async def newer_than(self, generation: int) -> Snapshot:
        if self.snapshot.generation <= generation:
            await asyncio.Event().wait()
        return self.snapshot


class AgentNode:
    """One node with an agent's device plugins. `binding` is early or late."""

    def __init__(self, scenario: Scenario, folder: Path, binding: str, *, reads_pods: bool, seed: int) -> None:
        """`reads_pods`: PodResources are read after a pod has gone, as they are once its DEL has changed the books."""
        self._scenario = scenario
        self._binding = binding
        self._reads_pods = reads_pods
        self._now = 0.0
        self._kubelet = Kubelet(folder, netns_dir=folder / "netns", seed=seed)
        self._ledger = Ledger.open(folder / "ledger.db", "boot")
        self._pod_resources = PodResources.of_kubelet(folder)
        resources = scenario.resources(binding)
        self._binder = Binder(
            folder,
            self._ledger,
            cdi.SlotSpecs(folder / "cdi"),
            resources=lambda: resources,
            stock=lambda: self._plugins.allocator.offer,
            ask_kubelet=self._ask_kubelet,
            network_of=lambda _name: None,
            is_settled=lambda: False,
        )
        self._plugins = DevicePlugins(
            Config(resources=resources, kubelet_dir=folder),
            _Still(scenario.snapshot),
            self._ledger,
            granting=self._binder.forget,
            clock=lambda: self._now,
        )
        self._conf = from_document({"cniVersion": "1.0.0", "name": "bench", "type": "nodefabric"})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[AgentNode]:
        """Start both sides, wait until kubelet knows all units, and end them."""
        self._loop = asyncio.get_running_loop()
        await self._kubelet.start()
        serving = asyncio.create_task(self._plugins.run())
        try:
            await self._until(lambda: serving.done() or (self._plugins.ready and self._is_settled()))
            yield self
            await self._plugins.close()
            await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await self._pod_resources.close()
            await self._kubelet.close()
            self._ledger.close()

    def free(self) -> Chance:
        """Tell what a new pod could get."""
        self._kubelet.devices.free()
        used = {unit for held in self._kubelet.devices.held for unit in held.ids}
        gpus = [u.device for u in self._plugins.units[GPU] if u.unit_id not in used and u.health.healthy]
        if self._binding == "late":
            bound = {b.device for b in self._ledger.bindings()}
            pool = self._plugins.allocator.offer.pools[NIC]
            nics = [u.device for u in pool if u.device not in bound and u.health.healthy]
        else:
            nics = [u.device for u in self._plugins.units[NIC] if u.unit_id not in used and u.health.healthy]
        return Chance(tuple(gpus), tuple(nics))

    async def come(self, step: Step) -> tuple[list[str], list[str]]:
        """Start a pod; give its GPUs and NICs."""
        self._now += AT_ONCE_SECONDS if step.at_once else PAUSE_SECONDS
        name = step.pod
        limits = tuple((resource, count) for resource, count in ((GPU, step.gpus), (NIC, step.nics)) if count)
        spec = PodSpec(NAMESPACE, name, containers=(Container(CONTAINER, limits),))
        pod = self._kubelet.create(spec)
        await self._until(lambda: pod.phase != "Pending")
        if pod.phase != "Running":
            raise RuntimeError(f"{self._scenario.node}: {step}: {pod.message}")
        held = {h.resource_name: h.ids for h in self._kubelet.devices.of_container(pod.uid, CONTAINER)}
        gpus = [unit.device for i in held.get(GPU, ()) if (unit := self._plugins.unit(i)) is not None]
        if self._binding == "late":
            bound = await asyncio.to_thread(self._binder.bind, self._call(name, pod.uid), lambda: True)
            nics = [granted.device for granted in bound]
        else:
            nics = [unit.device for i in held.get(NIC, ()) if (unit := self._plugins.unit(i)) is not None]
        await self._until(self._is_settled)
        if (len(gpus), len(nics)) != (step.gpus, step.nics):
            raise RuntimeError(f"{self._scenario.node}: {step} got {gpus} and {nics}")
        return gpus, nics

    async def go(self, name: str) -> None:
        """End a pod."""
        self._now += PAUSE_SECONDS
        if self._binding == "late":
            await asyncio.to_thread(self._binder.unbind, name, "eth0")
        await self._kubelet.delete(f"{NAMESPACE}/{name}")
        self._kubelet.devices.free()
        if self._binding == "late":
            # As the reconciler does when kubelet counts a unit to no pod any more.
            used = {unit for held in self._kubelet.devices.held for unit in held.ids}
            self._ledger.release([g.unit_id for g in self._ledger.grants() if g.unit_id not in used])
        if self._reads_pods:
            self._now += PAUSE_SECONDS
            self._plugins.allocator.heard(await self._pod_resources.list(), self._now)
        await self._until(self._is_settled)

    def _call(self, name: str, uid: str) -> Call:
        return Call(name, "eth0", None, "", PodRef(NAMESPACE, name, uid), "", "", self._conf)

    def _ask_kubelet(self, pod: PodRef) -> PodDevices | None:
        asked = asyncio.run_coroutine_threadsafe(self._pod_resources.get(pod), self._loop)
        return asked.result(DEADLINE_SECONDS)

    def _is_settled(self) -> bool:
        """Tell whether the lists say what the books say, and kubelet has them."""
        units = self._plugins.units
        known = self._kubelet.devices.resources
        if any(name not in known or known[name].healthy != _healthy(mine) for name, mine in units.items()):
            return False
        bound = {(b.unit_id, b.device) for b in self._ledger.bindings()}
        return {(u.unit_id, u.device) for u in units.get(NIC, ()) if u.is_slot and u.device} == bound

    async def _until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():  # noqa: ASYNC110 -- what is waited for happens on the other side of a socket
                await asyncio.sleep(0.002)


def _healthy(units: object) -> set[str]:
    return {unit.unit_id for unit in units if unit.health.healthy}  # type: ignore[attr-defined]
