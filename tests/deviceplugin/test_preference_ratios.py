"""What containers ask for beside what kubelet asks about, as far as the ones before tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from agent.config import Resource
from agent.model.allocation import PodRef
from agent.model.device import LinkLayer, Snapshot
from agent.offer.units import list_slots
from deviceplugin.preference import Ratios
from tests.agent.placement.hosts import Host
from tests.agent.placement.hosts import uuid as gpu_name
from tests.deviceplugin.desk import GPU, VF, Desk, desk, pod, take
from tests.node import change, gpu_uuid, node, rdma


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
