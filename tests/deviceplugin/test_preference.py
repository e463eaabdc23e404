"""Which units a container gets: what is near, what is free, and whose is what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import RailNic, Resource
from agent.model.allocation import PodRef
from agent.model.device import LinkLayer, Snapshot
from agent.offer.units import list_slots
from deviceplugin.preference import Ratios
from tests.agent.placement.hosts import Host, hosts
from tests.agent.placement.hosts import uuid as gpu_name
from tests.deviceplugin.desk import GPU, HCA, VF, Desk, desk, nics_at, pod, take
from tests.node import change, gpu_uuid, node, rdma


def test_a_gpu_chosen_first_is_one_whose_nic_is_free() -> None:
    hca = Resource("rdma/hca", "hca", shares=1)
    with desk(GPU, hca) as d:
        take(d, hca, [u.unit_id for u in d.allocator.offer.value.units[hca.name]][:3])
        assert d.get(GPU) == (gpu_uuid(3),)
        assert d.near(gpu_uuid(3), d.get(hca)[0])


def test_a_nic_chosen_first_is_one_whose_gpu_is_free() -> None:
    with desk(GPU, VF) as d:
        for rail in (0, 1, 3):
            take(d, GPU, [gpu_uuid(rail)])
        assert d.near(gpu_uuid(2), d.get(VF)[0])
        assert d.get(GPU) == (gpu_uuid(2),)


def test_a_unit_that_kubelet_calls_free_is_free() -> None:
    with desk(GPU, VF) as d:
        for rail in range(4):
            take(d, GPU, [gpu_uuid(rail)])
        d.allocator.prefer(GPU.name, [gpu_uuid(1)], (), 1)  # the only one that came back
        d.clock.now += 60
        assert d.near(gpu_uuid(1), d.prefer(VF)[0])


def test_a_unit_that_no_pod_holds_any_more_is_free_once_kubelet_was_read() -> None:
    with desk(GPU, VF) as d:
        for rail in range(4):
            take(d, GPU, [gpu_uuid(rail)])
        d.allocator.preference.read([pod("a", nvidia_com__gpu=[gpu_uuid(i) for i in (0, 1, 3)])], d.clock.now)
        assert d.near(gpu_uuid(2), d.prefer(VF)[0])


def test_a_reading_that_began_during_an_admission_frees_nothing() -> None:
    with desk(GPU, VF) as d:
        for rail in (0, 1, 2):
            asyncio.run(d.allocator.allocate(GPU.name, [[gpu_uuid(rail)]]))
        d.allocator.preference.read([], d.clock.now + 0.5)
        d.clock.now += 60
        assert d.near(gpu_uuid(3), d.prefer(VF)[0])


@pytest.mark.parametrize(
    ("resource_name", "unit_id", "next_gpu"),
    [
        ("nvidia_com__gpu", gpu_uuid(0), 1),
        ("nvidia_com__gpu", f"{gpu_uuid(0)}::3", 1),
        ("amd_com__gpu", "0", 1),
        ("team_example_com__accelerator", gpu_uuid(0), 1),
        ("example_com__tape", "0", 0),  # an index of something else
        ("example_com__gpudirect-nic", "0", 0),
    ],
)
def test_gpus_that_another_plugin_gave_are_in_use(resource_name: str, unit_id: str, next_gpu: int) -> None:
    with desk(VF, snapshot=node(rails=2)) as d:
        d.allocator.preference.read([pod("a", **{resource_name: [unit_id]})], d.clock.now)
        assert d.near(gpu_uuid(next_gpu), d.prefer(VF)[0])


def test_a_rail_is_near_its_own_nic_and_drawn_by_no_other() -> None:
    rail = Resource("rdma/rail", "rail", nic=RailNic("hca", shares=1))
    with desk(rail, VF) as d:
        alone = d.prefer(rail)
        (other,) = [u.unit_id for u in d.allocator.offer.value.units[rail.name] if u.gpu == gpu_uuid(3)]
        assert alone != (other,)
        (vf, *_) = [u.unit_id for u in d.allocator.offer.value.units[VF.name] if d.near(gpu_uuid(3), u.unit_id)]
        asyncio.run(d.allocator.allocate(VF.name, [[vf]]))
        assert d.prefer(rail) == alone


def test_a_grant_whose_pod_is_known_draws_no_partner() -> None:
    with desk(GPU, VF) as d:
        (gpu,) = d.get(GPU)  # of a pod that wants nothing else
        assert d.near(gpu, d.prefer(VF)[0])
        d.books.pods[gpu] = PodRef("default", "p")
        assert d.near(gpu, d.prefer(VF)[0])  # PodResources may have been read between its GPU and its VF
        d.clock.now += 1
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
        d.allocator.offer.set(None)  # type: ignore[arg-type]
        assert d.allocator.prefer(VF.name, ["b", "a"], (), 1) == ("b",)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_kubelet_asks_the_answer_is_whole_and_valid(data: st.DataObject) -> None:
    snapshot = data.draw(hosts(gpus=5, nics=4))
    resources = data.draw(st.permutations([GPU, VF, HCA]))[: data.draw(st.integers(1, 3))]
    with desk(*resources, snapshot=snapshot) as d:
        for _ in range(data.draw(st.integers(1, 8))):
            d.clock.now += data.draw(st.sampled_from([0.01, 60.0]))
            resource = data.draw(st.sampled_from(resources))
            units = [u.unit_id for u in d.allocator.offer.value.units[resource.name]]
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
                d.allocator.preference.read(
                    [pod("a", **{resource.name.replace("/", "__").replace(".", "_"): granted})], 0.0
                )


def test_a_nic_that_came_back_tells_of_its_pods_gpu() -> None:
    with desk(GPU, VF) as d:
        held = []
        for rail in range(4):
            (gpu,) = d.get(GPU)
            held.append((gpu, *d.get(VF)))
            d.clock.now += 60
            d.books.pods |= dict.fromkeys(held[rail], PodRef("default", f"p{rail}", "uid"))
        gpu, vf = held[2]
        d.used -= {gpu, vf}  # its pod has ended, and PodResources were not read since
        d.clock.now += 1
        assert d.near(gpu, d.get(VF)[0])
        assert d.get(GPU) == (gpu,)


def test_what_a_new_pod_of_the_same_name_has_does_not_come_back_with_the_old_ones() -> None:
    with desk(GPU, VF) as d:
        (old,) = d.get(VF)
        d.get(GPU)
        d.allocator.preference.read([pod("web-0", rdma__vf=[old], nvidia_com__gpu=[gpu_uuid(0)])], d.clock.now)
        d.clock.now += 60
        for rail in (0, 1, 2):
            take(d, GPU, [gpu_uuid(rail)])
            d.books.pods[gpu_uuid(rail)] = PodRef("default", "web-0")
        d.used.remove(old)
        assert d.near(gpu_uuid(3), d.get(VF)[0])


def test_gpus_that_must_have_come_back_unheard_of_get_a_nic_each() -> None:
    with desk(GPU, VF) as d:
        for rail in (0, 1, 2):
            take(d, GPU, [gpu_uuid(rail)])
        d.clock.now += 60
        vfs = d.get(VF, 2)  # kubelet would not ask if only one GPU were free, which it does not say
        assert len({unit[:7] for unit in vfs}) == 2
        assert any(d.near(gpu_uuid(3), vf) for vf in vfs)


def wide(gpus: int = 8, nics: int = 4) -> Snapshot:
    """Two sockets; below each switch a GPU and several adapters of its own, as on p5 instances."""
    host = Host()
    for rail in range(gpus):
        path = (f"pci0000:{rail:02x}", f"port{rail}", f"switch{rail}")
        host.gpu((*path, "g"), rail * 2 // gpus)
        for number in range(nics):
            host.nic((*path, f"n{number}"), rail * 2 // gpus)
    snapshot = host.snapshot()
    adapters = [d.address for d in snapshot.devices if d.pci_class == 0x020000]
    for n, address in enumerate(adapters):
        hca = rdma(n, f"0000:0000:0000:{n + 1:04x}", layer=LinkLayer.INFINIBAND)
        snapshot = change(snapshot, address, driver="mlx5_core", rdma_devices=(hca,))
    return snapshot


WHOLE = Resource("rdma/whole", "hca", shares=1)


def below_one_switch(d: Desk, nics: Sequence[str], gpus: Sequence[str]) -> int:
    """Count the NICs that stand below the switch of one of the GPUs."""
    return sum(any(d.near(gpu, nic) for gpu in gpus) for nic in nics)


def test_more_nics_than_there_are_gpus_are_for_as_many_gpus_as_they_stand_beside() -> None:
    with desk(GPU, WHOLE, snapshot=wide()) as d:
        nics = d.get(WHOLE, 16)
        gpus = d.get(GPU, 4)
        assert below_one_switch(d, nics, gpus) == 16
        assert len({d.distances.numa_node(gpu) for gpu in gpus}) == 1


@pytest.mark.parametrize("heard", [False, True])
def test_containers_are_taken_to_have_as_many_gpus_as_the_last_one_with_so_many_nics(heard: bool) -> None:
    with desk(GPU, WHOLE, snapshot=wide()) as d:
        if heard:  # of a pod that was there before the agent
            units = [u.unit_id for u in d.allocator.offer.value.units[WHOLE.name] if d.near(gpu_name(0), u.unit_id)]
            d.allocator.preference.read([pod("a", rdma__whole=units, ex_com__gpu=[gpu_name(0)])], d.clock.now)
            d.used.update((gpu_name(0), *units))
        else:
            assert below_one_switch(d, d.get(WHOLE, 4), d.get(GPU, 1)) == 1  # one each, for want of a better guess
        d.clock.now += 60
        nics = d.get(WHOLE, 4)
        assert below_one_switch(d, nics, d.get(GPU, 1)) == 4
        d.clock.now += 60
        nics = d.get(WHOLE, 8)  # in the same ratio
        assert below_one_switch(d, nics, d.get(GPU, 2)) == 8


def test_gpus_are_chosen_where_as_many_nics_are_free_as_containers_with_them_had() -> None:
    with desk(GPU, WHOLE, snapshot=wide()) as d:
        gpus = d.get(GPU, 2)
        assert below_one_switch(d, d.get(WHOLE, 8), gpus) == 8
        for number in (2, 3, 4, 6):
            take(d, WHOLE, nics_at_gpu(d, number)[:1])
        gpus = d.get(GPU, 2)
        assert below_one_switch(d, d.get(WHOLE, 8), gpus) == 8


def nics_at_gpu(d: Desk, number: int) -> list[str]:
    return [u.unit_id for u in d.allocator.offer.value.units[WHOLE.name] if d.near(gpu_name(number), u.unit_id)]


LATE = Resource("rdma/late", "vf", binding="late")


def test_the_device_of_a_slot_whose_pod_has_ended_is_free_before_kubelet_says_so() -> None:
    with desk(GPU, LATE, snapshot=node(vfs=1)) as d:
        slots = [unit.unit_id for unit in d.allocator.offer.value.units[LATE.name]]
        take(d, LATE, slots)
        pool = d.allocator.offer.value.pools[LATE.name]
        bound = dict(zip(slots, [unit.device for unit in pool], strict=True))
        d.clock.now += 60
        (over,) = [slot for slot, device in bound.items() if d.distances.distance(gpu_uuid(2), device).name == "PIX"]
        held = {**bound, over: ""}
        d.allocator.offer.set(
            replace(
                d.allocator.offer.value,
                units={**d.allocator.offer.value.units, LATE.name: list_slots(LATE, pool, held)},
            )
        )
        assert d.prefer(GPU) == (gpu_uuid(2),)


def test_a_slot_that_was_granted_just_now_is_in_use_before_its_device_is_chosen() -> None:
    with desk(GPU, LATE, snapshot=node(vfs=1)) as d:
        (slot,) = d.get(LATE)
        d.books.pods[slot] = PodRef("default", "a")
        d.clock.now += 0.5
        (gpu,) = d.prefer(GPU)
        assert d.distances.distance(gpu, d.allocator.offer.value.by_id[slot].beside).name != "PIX"


def test_what_seemed_to_be_one_containers_counts_until_kubelet_tells_of_the_pods() -> None:
    with desk(GPU, VF) as d:
        distances, resources = d.distances, {GPU.name: GPU, VF.name: VF}
        ratios = Ratios()
        both = pod("both", rdma__vf=["0000:12:00.1"], nvidia_com__gpu=[gpu_uuid(0)])
        ratios.read([both], resources, distances)
        ratios.note(VF.name, 1, 2)
        assert (ratios.nics(2), ratios.gpus(VF.name, 1)) == (1, 2)
        alone = [pod("nic", rdma__vf=["0000:22:00.1"]), pod("gpus", nvidia_com__gpu=[gpu_uuid(1)])]
        ratios.read([both, *alone], resources, distances)
        assert (ratios.nics(2), ratios.gpus(VF.name, 1)) == (2, 1)
