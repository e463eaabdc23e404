from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.clients.kubelet import ContainerDevices, DeviceAssignment, PodDevices
from agent.config import RailNic, Resource
from agent.errors import Unavailable
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from deviceplugin import usage
from deviceplugin.allocation import Allocator, Offer
from deviceplugin.resources import list_units
from tests.agent.placement.hosts import hosts
from tests.awaiting import until
from tests.deviceplugin.machines import gpu_uuid, node

GPU, VF, HCA = Resource("nvidia.com/gpu", "gpu"), Resource("rdma/vf", "vf"), Resource("rdma/hca", "hca", shares=2)


class Books:
    """Takes every grant, and knows the pods that it is told."""

    def __init__(self) -> None:
        self.pods: set[str] = set()

    def grant(self, resource_name: str, units: object) -> None:
        """Take a grant."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """An allocator, asked as kubelet asks."""

    def __init__(self, *resources: Resource, snapshot: Snapshot | None = None) -> None:
        self.books, self.clock = Books(), Clock()
        self.allocator = Allocator(resources, self.books, self.clock, self.books.pods.__contains__)
        snapshot = snapshot or node()
        self.allocator.offer = Offer(snapshot, list_units(resources, snapshot))
        self.terrain = self.allocator.offer.terrain
        self.used: set[str] = set()

    def prefer(self, resource: Resource, size: int = 1) -> tuple[str, ...]:
        free = [u.unit_id for u in self.allocator.offer.units[resource.name] if u.unit_id not in self.used]
        return self.allocator.prefer(resource.name, free, (), size)

    def get(self, resource: Resource, size: int = 1) -> tuple[str, ...]:
        """Prefer and allocate; give the units."""
        units = self.prefer(resource, size)
        asyncio.run(self.allocator.allocate(resource.name, [units]))
        self.used.update(units)
        return units

    def near(self, gpu: str, nic: str) -> bool:
        unit = self.allocator.offer.by_id[nic]
        return self.terrain.distance(gpu, unit.device).name == "PIX"


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


def test_a_gpu_chosen_first_is_one_whose_nic_is_free() -> None:
    with desk(GPU, Resource("rdma/hca", "hca", shares=1)) as d:
        hca = Resource("rdma/hca", "hca", shares=1)
        taken = [u.unit_id for u in d.allocator.offer.units["rdma/hca"]][:3]
        asyncio.run(d.allocator.allocate("rdma/hca", [taken]))
        d.used.update(taken)
        d.clock.now += 60
        assert d.get(GPU) == (gpu_uuid(3),)
        assert d.near(gpu_uuid(3), d.get(hca)[0])


def test_a_nic_chosen_first_is_one_whose_gpu_is_free() -> None:
    with desk(GPU, VF) as d:
        for rail in (0, 1, 3):
            asyncio.run(d.allocator.allocate(GPU.name, [[gpu_uuid(rail)]]))
            d.used.add(gpu_uuid(rail))
        d.clock.now += 60
        assert d.near(gpu_uuid(2), d.get(VF)[0])
        assert d.get(GPU) == (gpu_uuid(2),)


def test_a_unit_that_kubelet_calls_free_is_free() -> None:
    with desk(GPU, VF) as d:
        for rail in range(4):
            asyncio.run(d.allocator.allocate(GPU.name, [[gpu_uuid(rail)]]))
        d.clock.now += 60
        d.allocator.prefer(GPU.name, [gpu_uuid(1)], (), 1)  # the only one that came back
        d.clock.now += 60
        assert d.near(gpu_uuid(1), d.prefer(VF)[0])


def test_a_unit_that_no_pod_holds_any_more_is_free_once_kubelet_was_read() -> None:
    with desk(GPU, VF) as d:
        for rail in range(4):
            asyncio.run(d.allocator.allocate(GPU.name, [[gpu_uuid(rail)]]))
        d.clock.now += 60
        d.allocator.heard([pod("a", nvidia_com__gpu=[gpu_uuid(i) for i in (0, 1, 3)])], d.clock.now)
        assert d.near(gpu_uuid(2), d.prefer(VF)[0])


def test_a_reading_that_began_during_an_admission_frees_nothing() -> None:
    with desk(GPU, VF) as d:
        for rail in (0, 1, 2):
            asyncio.run(d.allocator.allocate(GPU.name, [[gpu_uuid(rail)]]))
        d.allocator.heard([], d.clock.now + 0.5)
        d.clock.now += 60
        assert d.near(gpu_uuid(3), d.prefer(VF)[0])


def test_after_a_restart_what_pods_hold_is_in_use() -> None:
    with desk(GPU, VF) as d:
        d.allocator.heard([pod("a", nvidia_com__gpu=[gpu_uuid(i) for i in (0, 1, 3)])], d.clock.now)
        assert d.near(gpu_uuid(2), d.prefer(VF)[0])


@pytest.mark.parametrize(
    ("resource_name", "unit_id"),
    [
        ("nvidia_com__gpu", gpu_uuid(0)),
        ("nvidia_com__gpu", f"{gpu_uuid(0)}::3"),
        ("nvidia_com__gpu", "0"),
        ("nvidia_com__mig-1g", "0:1"),
        ("amd_com__gpu", "0"),
        ("team_example_com__accelerator", gpu_uuid(0)),
    ],
)
def test_gpus_that_another_plugin_gave_are_in_use(resource_name: str, unit_id: str) -> None:
    with desk(VF, snapshot=node(rails=2)) as d:
        d.allocator.heard([pod("a", **{resource_name: [unit_id]})], d.clock.now)
        assert d.near(gpu_uuid(1), d.prefer(VF)[0])


@pytest.mark.parametrize("resource_name", ["example_com__tape", "nvidia_com__hostdev", "example_com__gpudirect-nic"])
def test_an_index_of_something_else_is_no_gpu(resource_name: str) -> None:
    with desk(VF, snapshot=node(rails=2)) as d:
        d.allocator.heard([pod("a", **{resource_name: ["0"]})], d.clock.now)
        assert d.near(gpu_uuid(0), d.prefer(VF)[0])


def test_a_rail_is_near_its_own_nic_and_drawn_by_no_other() -> None:
    rail = Resource("rdma/rail", "rail", nic=RailNic("hca", shares=1))
    with desk(rail, VF) as d:
        alone = d.prefer(rail)
        (other,) = [u.unit_id for u in d.allocator.offer.units[rail.name] if u.gpu == gpu_uuid(3)]
        assert alone != (other,)
        (vf, *_) = [u.unit_id for u in d.allocator.offer.units[VF.name] if d.near(gpu_uuid(3), u.unit_id)]
        asyncio.run(d.allocator.allocate(VF.name, [[vf]]))
        assert d.prefer(rail) == alone


def test_a_grant_whose_pod_is_known_draws_no_partner() -> None:
    with desk(GPU, VF) as d:
        (gpu,) = d.get(GPU)  # of a pod that wants nothing else
        assert d.near(gpu, d.prefer(VF)[0])
        d.books.pods.add(gpu)
        assert not d.near(gpu, d.prefer(VF)[0])
        (vf,) = d.get(VF)
        assert d.near(d.get(GPU)[0], vf)


def test_a_nic_taken_for_another_containers_goes_with_the_gpus_that_it_fits() -> None:
    with desk(GPU, VF) as d:
        assert d.get(GPU) == (gpu_uuid(0),)  # of a container that wants nothing else
        assert all(d.near(gpu_uuid(0), vf) for vf in d.get(VF, 2))
        assert gpu_uuid(1) in d.get(GPU, 2)  # on the same socket; two of the other one would be near each other
        (other,) = d.get(VF)  # a third container's: its GPU is still to come
        assert d.near(d.get(GPU)[0], other)


def test_each_of_several_gpus_has_a_nic_of_its_own_in_either_order() -> None:
    for order in ((GPU, VF), (VF, GPU)):
        with desk(GPU, VF) as d:
            held = {resource.kind: d.get(resource, 4) for resource in order}
            assert all(sum(d.near(gpu, vf) for vf in held["vf"]) == 1 for gpu in held["gpu"])


def test_two_nics_of_one_container_follow_the_same_gpu() -> None:
    with desk(GPU, VF, HCA) as d:
        (vf,), (hca,), (gpu,) = d.get(VF), d.get(HCA), d.get(GPU)
        assert d.near(gpu, vf)
        assert d.near(gpu, hca)


def test_a_nic_follows_the_gpu_and_not_another_nic_that_had_to_be_farther() -> None:
    with desk(GPU, VF, HCA) as d:
        take(d, HCA, nics_at(d, HCA, 1))
        asyncio.run(d.allocator.allocate(GPU.name, [[gpu_uuid(1)]]))
        assert nics_at(d, HCA, 0)[0] in d.get(HCA)  # on the same socket
        assert d.near(gpu_uuid(1), d.get(VF)[0])


def test_nics_of_a_container_without_gpus_are_near_each_other() -> None:
    with desk(VF, HCA) as d:
        asyncio.run(d.allocator.allocate(VF.name, [nics_at(d, VF, 2)[:1]]))
        assert d.near(gpu_uuid(2), d.get(HCA)[0])


def nics_at(d: Desk, resource: Resource, rail: int) -> list[str]:
    return [u.unit_id for u in d.allocator.offer.units[resource.name] if d.near(gpu_uuid(rail), u.unit_id)]


def take(d: Desk, resource: Resource, units: Sequence[str]) -> None:
    """Have some pod that is long admitted hold these units."""
    asyncio.run(d.allocator.allocate(resource.name, [units]))
    d.used.update(units)
    d.clock.now += 60


def test_of_equal_gpus_the_one_whose_nic_is_least_used_is_taken() -> None:
    with desk(GPU, VF) as d:
        assert d.prefer(GPU) == (gpu_uuid(0),)
        take(d, VF, nics_at(d, VF, 0)[:1])
        assert d.prefer(GPU) == (gpu_uuid(1),)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_port_that_one_of_two_nic_resources_has_used_up_is_not_free(order: tuple[int, int]) -> None:
    hca = Resource("rdma/hca", "hca", shares=8)
    with desk(GPU, *((VF, hca)[n] for n in order)) as d:
        take(d, VF, nics_at(d, VF, 0))
        for rail in (1, 2, 3):  # more in use than there, and something left of each
            take(d, VF, nics_at(d, VF, rail)[:3])
            take(d, hca, nics_at(d, hca, rail)[: 3 + rail])
        assert d.prefer(GPU) == (gpu_uuid(1),)


def test_where_one_nic_resource_has_nothing_left_at_all_the_other_one_counts() -> None:
    with desk(GPU, VF, HCA) as d:
        for rail in range(4):
            take(d, VF, nics_at(d, VF, rail))
        for rail in (0, 1, 3):
            take(d, HCA, nics_at(d, HCA, rail))
        assert d.prefer(GPU) == (gpu_uuid(2),)


def test_a_surprise_ends_in_the_first_units_available() -> None:
    with desk(GPU, VF) as d:
        assert d.allocator.prefer("no/resource", ["b", "a"], ("c",), 2) == ("c", "b")
        d.allocator.offer = None  # type: ignore[assignment]
        assert d.allocator.prefer(VF.name, ["b", "a"], (), 1) == ("b",)


def test_kubelet_is_read_at_the_start_and_after_each_change() -> None:
    async def work() -> None:
        changed, answers, heard = asyncio.Event(), iter([[pod("a")], None, [pod("b")]]), list[object]()

        async def pods() -> Sequence[PodDevices]:
            if (answer := next(answers)) is None:
                raise Unavailable("kubelet is away")
            return answer

        following = asyncio.create_task(
            usage.follow(changed, pods, lambda *x: heard.append(x), lambda: 7.0, needed=lambda: True, settle=0, pause=0)
        )
        await until(lambda: heard == [([pod("a")], 7.0)])
        changed.set()
        await until(lambda: not changed.is_set())
        changed.set()
        await until(lambda: len(heard) == 2)
        assert heard[1] == ([pod("b")], 7.0)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(work())


def test_kubelet_is_not_read_on_a_node_without_gpus() -> None:
    async def work() -> None:
        changed, asked = asyncio.Event(), list[bool]()

        async def pods() -> Sequence[PodDevices]:
            raise AssertionError("asked")

        def needed() -> bool:
            asked.append(True)
            return False

        following = asyncio.create_task(
            usage.follow(changed, pods, lambda *_: None, lambda: 0.0, needed=needed, settle=0, pause=0)
        )
        await until(lambda: asked)
        changed.set()
        await until(lambda: len(asked) == 2)
        assert not following.done()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(work())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_kubelet_asks_the_answer_is_whole_and_valid(data: st.DataObject) -> None:
    snapshot = data.draw(hosts(gpus=5, nics=4))
    resources = data.draw(st.permutations([GPU, VF, HCA]))[: data.draw(st.integers(1, 3))]
    with desk(*resources, snapshot=snapshot) as d:
        for _ in range(data.draw(st.integers(1, 8))):
            d.clock.now += data.draw(st.sampled_from([0.01, 60.0]))
            resource = data.draw(st.sampled_from(resources))
            units = [u.unit_id for u in d.allocator.offer.units[resource.name]]
            known = st.sampled_from([*units, "unknown"])
            available = data.draw(st.lists(known, unique=True, max_size=12))
            must = data.draw(st.lists(st.sampled_from(available), unique=True, max_size=2)) if available else []
            size = data.draw(st.integers(len(must), len(available) + 1))
            found = d.allocator.prefer(resource.name, available, must, size)
            assert len(found) == len(set(found)) == min(size, len(available))
            assert set(must) <= set(found) <= set(available)
            granted = [unit for unit in found if unit != "unknown"]
            if data.draw(st.booleans()):
                asyncio.run(d.allocator.allocate(resource.name, [granted]))
            if data.draw(st.booleans()):
                d.allocator.heard([pod("a", **{resource.name.replace("/", "__").replace(".", "_"): granted})], 0.0)
