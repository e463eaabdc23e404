"""What a choice of late-bound devices always holds to, whatever is free and wished."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.model.health import HEALTHY
from agent.model.topology import Locality
from agent.offer.offer import Unit
from agent.placement import Distances
from deviceplugin.dra.planner import LateWish, choose_late
from tests.deviceplugin.machines import gpu_uuid, node

RAILS, VFS = 4, 3
SNAPSHOT = node(rails=RAILS, vfs=VFS)
DISTANCES = Distances(SNAPSHOT)
PLACES = [tuple(pf.vfs) for pf in SNAPSHOT.devices if pf.vfs]
UNITS = [Unit(vf, "rdma/vf", "vf", vf, HEALTHY, SNAPSHOT.by_address[vf].numa_node) for place in PLACES for vf in place]
WISHES = st.lists(
    st.tuples(st.integers(0, RAILS - 1), st.booleans(), st.none() | st.integers(0, 2)), min_size=1, max_size=8
)
GPUS = st.dictionaries(
    st.none() | st.integers(0, 2), st.lists(st.integers(0, RAILS - 1).map(gpu_uuid), unique=True), max_size=4
)


@settings(max_examples=200, deadline=None)
@given(WISHES, st.sets(st.sampled_from(UNITS), max_size=RAILS * VFS), GPUS)
def test_each_result_gets_a_free_device_of_its_own_and_the_pinned_ones_their_place(
    asked: list[tuple[int, bool, int | None]], free: set[Unit], gpus: dict[int | None, list[str]]
) -> None:
    wishes = [LateWish(PLACES[place], pinned, container) for place, pinned, container in asked]
    chosen = choose_late(DISTANCES, wishes, sorted(free, key=lambda unit: unit.device), gpus, {})

    there = Counter(next(i for i, place in enumerate(PLACES) if unit.device in place) for unit in free)
    pinned = Counter(place for place, is_pinned, _ in asked if is_pinned)
    if len(wishes) > len(free) or any(there[place] < count for place, count in pinned.items()):
        assert chosen is None
        return
    assert chosen is not None
    assert len(set(chosen)) == len(wishes)
    assert set(chosen) <= {unit.device for unit in free}
    assert all(device in wish.place for device, wish in zip(chosen, wishes, strict=True) if wish.is_pinned)


def test_with_all_free_every_gpu_has_a_device_below_its_switch() -> None:
    gpus = [gpu_uuid(rail) for rail in range(RAILS)]
    wishes = [LateWish(PLACES[0], False) for _ in gpus]
    chosen = choose_late(DISTANCES, wishes, UNITS, {None: gpus}, {})

    assert chosen is not None
    near = [DISTANCES.distance(gpu, vf) for gpu, vf in zip(gpus, chosen, strict=True)]
    assert near == [Locality.PIX] * RAILS


def test_without_spread_one_adapter_is_filled_before_another() -> None:
    wishes = [LateWish(PLACES[0], False)] * VFS
    load = {DISTANCES.port(PLACES[2][0]): 1}
    filled = choose_late(DISTANCES, wishes, UNITS, {}, load, spread=False)
    spread = choose_late(DISTANCES, wishes, UNITS, {None: [gpu_uuid(1)]}, load, spread=False)

    assert filled is not None
    assert set(filled) == set(PLACES[0])  # the place that the scheduler has chosen goes first
    assert spread is not None
    assert set(spread) == set(PLACES[1])
