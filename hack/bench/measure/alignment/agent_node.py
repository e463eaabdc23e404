"""One node's allocator and binder, and the device manager of the kubelet stand-in, in one process and one time.

What takes seconds on a node takes no time here, but happens in its order: kubelet frees what a pod had when it next
looks, CNI ADD tells the books whose a grant is, and PodResources are read some seconds after the books have changed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agent.config import Config, HealthSettings
from agent.edits.device_info import GrantedFiles
from agent.edits.specs import Specs
from agent.edits.unit_specs import UnitSpecs
from agent.health_history import HealthHistory
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, PodDevices
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.offer.offer import Offer
from agent.offer.offers import Offers, read
from agent.state import Latest
from cni.call import Call
from cni.netconf import from_document
from cni.pod_devices import HeldDevices
from cni.slots.binder import Binder
from deviceplugin.allocation import Allocator
from deviceplugin.grant_records import GrantRecords
from hack.sim.devices import DeviceManager, Held, Known
from hack.sim.pods import Container
from measure.alignment.scenarios import NIC, Scenario
from measure.alignment.score import Chance, Part
from measure.alignment.stream import Play, Step
from proto.deviceplugin.v1beta1 import api_pb2

NAMESPACE = "default"
ADD_SECONDS = 0.1
"""From the admission of a pod to its CNI ADD."""
READ_SECONDS, READ_PAUSE_SECONDS = 1.1, 3.0
"""PodResources are read so long after a change in the books, and after they were read last (`Usage`)."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the node binds, and what it knows."""

    binding: str
    """early or late."""
    reads_pods: bool = True
    """Whether it reads PodResources. If not, no pod's end is told but by kubelet's calls."""
    foresees: bool = False
    """It knows how many GPUs and NICs a pod's containers will ask for, before kubelet asks."""


class AgentNode:
    """A node on which pods come and go."""

    def __init__(self, scenario: Scenario, folder: Path, way: Way, play: Play, seed: int) -> None:
        self._way = way
        self._now = 0.0
        self._distances = scenario.distances
        self._pods: dict[str, PodRef] = {}
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._read_at = 0.0
        self._devices = DeviceManager(folder / "checkpoint", random.Random(seed), lambda: set(self._pods))
        self._ledger = Ledger.open(folder / "ledger.db", "boot")
        gpus, nics = scenario.resources(way.binding, other_plugin=play.other_plugin)
        self.gpu = gpus if isinstance(gpus, str) else gpus.name
        self._resources = (nics,) if isinstance(gpus, str) else (gpus, nics)
        self._snapshot = scenario.snapshot
        self._offer = Latest(Offer())
        config = Latest(Config(resources=self._resources, kubelet_dir=folder))
        specs = Specs(self._ledger, folder / "cdi")
        self._binder = Binder(config, self._ledger, specs, self._offer, _PodDevices(self))
        units = UnitSpecs(self._ledger, specs, Latest(False))
        files = GrantedFiles(folder / "devinfo")
        records = GrantRecords(self._ledger, files, self._offer, specs, units)
        self._allocator = Allocator(self._offer, records.grant, self._ledger.pod_of, self._time)
        self._offers = Offers(HealthHistory(HealthSettings(0, 0, 0), self._time), self._time)
        for resource in self._resources:
            self._devices.resources[resource.name] = Known(_OurPlugin(self._allocator, resource.name))
        if isinstance(gpus, str):
            self._devices.resources[gpus] = Known(_OtherPlugin())
            self._devices.update(gpus, [_device(gpu, healthy=True) for gpu in self._distances.gpus])
        self._conf = from_document({"cniVersion": "1.0.0", "name": "bench", "type": "nodefabric"})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[AgentNode]:
        """Make the first lists; end what was begun."""
        try:
            self._offer_anew()
            yield self
        finally:
            self._allocator.close()
            self._ledger.close()

    def _time(self) -> float:
        return self._now

    def free(self) -> Chance:
        """Tell what a new pod could get."""
        self._devices.free()
        used = {unit for held in self._devices.held for unit in held.ids}
        gpus = [self._gpu(unit) for unit in sorted(self._devices.resources[self.gpu].healthy - used)]
        if self._way.binding == "late":
            bound = {slot.device for slot in self._ledger.bound_slots()}
            nics = [u.device for u in self._offer.value.pools[NIC] if u.device not in bound and u.health.healthy]
        else:
            nics = [u.device for u in self._offer.value.units[NIC] if u.unit_id not in used and u.health.healthy]
        return Chance(tuple(gpus), tuple(nics))

    async def come(self, step: Step) -> list[Part]:
        """Start a pod; give the GPUs and NICs of each container."""
        self._advance(step.after)
        pod = self._pods[step.pod] = PodRef(NAMESPACE, step.pod, step.pod)
        if self._way.foresees:
            for gpus, nics in step.containers:
                if gpus and nics:
                    self._allocator.preference.ratios.note(NIC, nics, gpus)
        wanted = [
            Container(f"c{number}", tuple((name, n) for name, n in zip((self.gpu, NIC), shape, strict=True) if n))
            for number, shape in enumerate(step.containers)
        ]
        await self._devices.admit(step.pod, (), wanted)
        self._note_change()
        bound: dict[str, list[str]] = {}
        if self._way.binding == "late":
            self._binder.bind(Call(step.pod, "eth0", None, "", pod, "", "", self._conf), lambda: True)
            for slot in self._ledger.bound_slots(step.pod):
                bound.setdefault(slot.container, []).append(slot.device)
            self._offer_anew()
        else:
            units = [unit for held in self._of(step.pod) for unit in held.ids]
            self._due.append((self._now + ADD_SECONDS, partial(self._ledger.bind, units, pod)))
        found: list[Part] = []
        for container in wanted:
            held = {h.resource_name: h.ids for h in self._devices.of_container(step.pod, container.name)}
            early = [u.device for i in held.get(NIC, ()) if (u := self._offer.value.by_id.get(i)) is not None]
            mine = bound.get(container.name, []) if self._way.binding == "late" else early
            found.append(([self._gpu(unit) for unit in held.get(self.gpu, ())], mine))
        if [(len(a), len(b)) for a, b in found] != list(step.containers):
            raise RuntimeError(f"{step} got {found}")
        return found

    def go(self, step: Step) -> None:
        """End a pod."""
        self._advance(step.after)
        del self._pods[step.pod]
        if self._way.binding == "late":
            self._binder.unbind(step.pod, "eth0")
            self._devices.free()
            # As the reconciler does when kubelet counts a unit to no pod any more.
            used = {unit for held in self._devices.held for unit in held.ids}
            self._ledger.release(hold.key for hold in self._ledger.holds() if hold.key not in used)
            self._offer_anew()
        self._note_change()

    def listing(self, names: Iterable[str]) -> tuple[PodDevices, ...]:
        """Tell what kubelet's PodResources would of some pods."""
        return tuple(
            PodDevices(self._pods[name], tuple(ContainerDevices(c, tuple(a)) for c, a in self._by_container(name)))
            for name in names
        )

    def _by_container(self, pod: str) -> Iterable[tuple[str, list[DeviceAssignment]]]:
        found: dict[str, list[DeviceAssignment]] = {}
        for held in self._of(pod):
            found.setdefault(held.container, []).append(DeviceAssignment(held.resource_name, held.ids))
        return found.items()

    def _of(self, pod: str) -> list[Held]:
        return [held for held in self._devices.held if held.pod_uid == pod]

    def _gpu(self, unit: str) -> str:
        return self._distances.gpu(unit) or unit

    def _advance(self, seconds: float) -> None:
        """Let time go by, with what is due meanwhile."""
        end = self._now + seconds
        while self._due and (first := min(self._due, key=lambda due: due[0]))[0] <= end:
            self._due.remove(first)
            self._now = first[0]
            first[1]()
        self._now = end

    def _note_change(self) -> None:
        if self._way.reads_pods and self._read_at <= self._now:
            self._read_at = max(self._now + READ_SECONDS, self._read_at + READ_PAUSE_SECONDS)
            self._due.append((self._read_at, self._read))

    def _read(self) -> None:
        self._devices.free()
        self._allocator.preference.read(self.listing(self._pods), self._now)

    def _offer_anew(self) -> None:
        """Post lists as the books are now."""
        books = read(self._ledger, with_names=False)
        offer = self._offers.make(self._resources, self._snapshot, books)
        self._offer.set(offer)
        for resource in self._resources:
            units = offer.units[resource.name]
            self._devices.update(resource.name, [_device(u.unit_id, healthy=u.health.healthy) for u in units])


class _OurPlugin:
    """The device plugin of one resource, without its sockets."""

    prefers = True

    def __init__(self, allocator: Allocator, resource_name: str) -> None:
        self._allocator = allocator
        self._name = resource_name

    async def preferred(self, available: Iterable[str], must_include: Iterable[str], size: int) -> tuple[str, ...]:
        return self._allocator.prefer(self._name, list(available), list(must_include), size)

    async def allocate(self, ids: Iterable[str]) -> api_pb2.ContainerAllocateResponse:
        await self._allocator.allocate(self._name, [list(ids)])
        return api_pb2.ContainerAllocateResponse()


class _OtherPlugin:
    """Another vendor's, that has no preference."""

    prefers = False

    async def preferred(self, available: Iterable[str], must_include: Iterable[str], size: int) -> tuple[str, ...]:
        raise NotImplementedError

    async def allocate(self, ids: Iterable[str]) -> api_pb2.ContainerAllocateResponse:
        return api_pb2.ContainerAllocateResponse()


class _PodDevices(HeldDevices):
    """Always asks kubelet, as after a start."""

    def __init__(self, node: AgentNode) -> None:
        self._listed_by = node

    @property
    def is_settled(self) -> bool:
        return False

    def pod_devices(self, pod: PodRef) -> PodDevices | None:
        return self._listed_by.listing([pod.name])[0]


def _device(unit: str, *, healthy: bool) -> api_pb2.Device:
    return api_pb2.Device(ID=unit, health="Healthy" if healthy else "Unhealthy")
