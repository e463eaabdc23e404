"""Slots: on each NUMA node as many as there are devices to be had, whatever is granted, bound, sick or gone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agent.config import Resource
from agent.model.health import HEALTHY, unhealthy
from agent.model.unit_id import UnitId, slot_id
from agent.offer.offer import Unit
from agent.offer.units import list_slots

LATE = Resource("rdma/vf", "vf", binding="late")


def device(number: int, node: int = 0, reason: str = "") -> Unit:
    address = f"0000:{0x3B + node:02x}:{number // 8:02x}.{number % 8}"
    return Unit(address, LATE.name, "vf", address, unhealthy(reason) if reason else HEALTHY, node, (f"mlx5_{number}",))


def shown(units: tuple[Unit, ...]) -> list[tuple[str, bool]]:
    return [(unit.unit_id.removeprefix("slot-rdma:vf-"), unit.health.healthy) for unit in units]


def test_a_slot_is_listed_for_each_device_on_its_numa_node() -> None:
    units = list_slots(LATE, [device(0), device(1), device(2, node=1), device(3, node=-1)])
    assert shown(units) == [("any-0", True), ("0-0", True), ("0-1", True), ("1-0", True)]
    assert {unit.device for unit in units} == {""}
    assert [unit.numa_node for unit in units] == [-1, 0, 0, 1]
    assert all(unit.is_slot and unit.kind == "vf" for unit in units)


def test_a_granted_slot_is_the_last_to_be_called_unhealthy() -> None:
    held = {slot_id(LATE.name, 0, 1): ""}
    units = list_slots(LATE, [device(0, reason="NoDriver"), device(1)], held)
    assert shown(units) == [("0-0", False), ("0-1", True)]


def test_a_bound_slot_is_as_healthy_as_its_device() -> None:
    slot = slot_id(LATE.name, 0, 0)
    for reason in ("", "LinkDown"):
        units = list_slots(LATE, [device(0), device(1, reason=reason)], {slot: device(1).device})
        assert units[0].device == device(1).device
        assert units[0].rdma_devices == ("mlx5_1",)
        assert shown(units) == [("0-0", not reason), ("0-1", True)]


def test_fewer_slots_than_devices_are_shared_out_to_numa_nodes() -> None:
    devices = [device(n) for n in range(4)] + [device(n, node=1) for n in range(2)]
    for slots, shares in ((3, {0: 2, 1: 1}), (4, {0: 3, 1: 1}), (5, {0: 3, 1: 2}), (1, {0: 1})):
        counts = Counter(unit.numa_node for unit in list_slots(replace(LATE, slots=slots), devices))
        assert counts == shares
    assert len(list_slots(replace(LATE, slots=100), devices)) == 6


def test_slots_of_another_resource_are_none_of_ours() -> None:
    held = {"slot-rdma:other-0-0": "", "0000:3b:02.1": "", "slot-rdma:other-0-1": device(0).device}
    assert [unit.unit_id for unit in list_slots(LATE, [device(0)], held)] == [slot_id(LATE.name, 0, 0)]


@given(st.data())
def test_kubelet_finds_as_many_slots_on_a_numa_node_as_devices(data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.integers(0, 3), max_size=12))
    devices = [
        device(n, node, data.draw(st.sampled_from(["", "", "LinkDown", "NoDriver"]))) for n, node in enumerate(nodes)
    ]
    names = st.builds(lambda node, n: slot_id(LATE.name, node, n), st.integers(0, 3), st.integers(0, 6))
    granted = frozenset(data.draw(st.sets(names, max_size=8)))
    bound_slots = data.draw(st.lists(st.sampled_from(sorted(granted)), unique=True)) if granted else []
    bound = dict(zip(bound_slots, (unit.device for unit in data.draw(st.permutations(devices))), strict=False))
    limit = data.draw(st.none() | st.integers(1, 12))
    units = list_slots(replace(LATE, slots=limit), devices, {**dict.fromkeys(granted, ""), **bound})

    listed = {unit.unit_id: unit for unit in units}
    assert len(listed) == len(units)
    assert granted <= listed.keys()
    for node in range(4):
        free = [d for d in devices if d.numa_node == node and d.device not in bound.values()]
        open_slots = [u for u in units if u.numa_node == node and not u.device]
        waiting = [slot for slot in granted if slot not in bound and UnitId.parse(slot).numa_node == node]
        well = sum(d.health.healthy for d in free)
        if limit is None:
            assert len(open_slots) == max(len(free), len(waiting))
            assert sum(u.health.healthy for u in open_slots) == well
        else:
            assert len(waiting) <= len(open_slots) <= max(len(free), len(waiting))
            assert sum(u.health.healthy for u in open_slots) == min(well, len(open_slots))
