"""An allocator that is asked as kubelet asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from agent.config import Resource
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, PodDevices
from agent.model.allocation import Hold, PodRef
from agent.model.device import Snapshot
from agent.offer.offer import Offer
from agent.offer.units import plain_offer
from agent.state import Latest
from deviceplugin.allocation import Allocator
from tests.node import gpu_uuid, node

GPU, VF, HCA = Resource("nvidia.com/gpu", "gpu"), Resource("rdma/vf", "vf"), Resource("rdma/hca", "hca", shares=2)


class Books:
    """Takes every grant, and knows the pods that it is told."""

    def __init__(self) -> None:
        self.pods: dict[str, PodRef] = {}
        self.holds: list[Hold] = []


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """An allocator, asked as kubelet asks."""

    def __init__(self, *resources: Resource, snapshot: Snapshot | None = None) -> None:
        self.books, self.clock = Books(), Clock()
        self.allocator = Allocator(Latest(Offer()), self.books.holds.extend, self.books.pods.get, self.clock)
        snapshot = snapshot or node()
        self.allocator.offer.set(plain_offer(resources, snapshot))
        self.distances = self.allocator.offer.value.distances
        self.used: set[str] = set()

    def prefer(self, resource: Resource, size: int = 1) -> tuple[str, ...]:
        free = [u.unit_id for u in self.allocator.offer.value.units[resource.name] if u.unit_id not in self.used]
        return self.allocator.prefer(resource.name, free, (), size)

    def get(self, resource: Resource, size: int = 1) -> tuple[str, ...]:
        """Prefer and allocate; give the units."""
        units = self.prefer(resource, size)
        asyncio.run(self.allocator.allocate(resource.name, [units]))
        self.used.update(units)
        return units

    def near(self, gpu: str, nic: str) -> bool:
        unit = self.allocator.offer.value.by_id[nic]
        return self.distances.distance(gpu, unit.device).name == "PIX"


@contextlib.contextmanager
def desk(*resources: Resource, snapshot: Snapshot | None = None) -> Iterator[Desk]:
    made = Desk(*resources, snapshot=snapshot)
    with contextlib.closing(made.allocator):
        yield made


def pod(name: str, **units: Sequence[str]) -> PodDevices:
    """What PodResources tell of a pod: units by resource, spelled with _ for . and __ for /."""
    names = {key.replace("__", "/").replace("_", "."): ids for key, ids in units.items()}
    return PodDevices(
        PodRef("default", name),
        (ContainerDevices("c", tuple(DeviceAssignment(n, (i,)) for n, ids in names.items() for i in ids)),),
    )


def nics_at(d: Desk, resource: Resource, rail: int) -> list[str]:
    return [u.unit_id for u in d.allocator.offer.value.units[resource.name] if d.near(gpu_uuid(rail), u.unit_id)]


def take(d: Desk, resource: Resource, units: Sequence[str]) -> None:
    """Have some pod that is long admitted hold these units."""
    asyncio.run(d.allocator.allocate(resource.name, [units]))
    d.used.update(units)
    d.clock.now += 60
