"""Placement against brute force: no choice is better than the one that is made."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent.model.device import Snapshot
from agent.placement import Terrain, choose_gpus, choose_pairs, match_nics
from tests.agent.placement.brute import best_nics, gpu_key, gpu_sets, nic_key, pair_keys
from tests.agent.placement.hosts import AnyTerrain, any_terrains, hosts


def nics_of(snapshot: Snapshot) -> list[str]:
    """List what can be taken: VFs, and adapters without VFs."""
    return [d.address for d in snapshot.devices if d.pci_class == 0x020000 and (d.is_vf or not d.sriov_totalvfs)]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), snapshot=hosts(gpus=4))
def test_no_other_choice_of_nics_is_better(data: st.DataObject, snapshot: Snapshot) -> None:
    terrain = Terrain(snapshot)
    free = data.draw(st.lists(st.sampled_from(nics_of(snapshot) or ["none"]), unique=True, max_size=6))
    gpus = data.draw(st.lists(st.sampled_from(terrain.gpus), unique=True, min_size=1))
    assume(len(free) >= len(gpus) and "none" not in free)
    load = {terrain.port(n): data.draw(st.integers(0, 3)) for n in free}
    found = match_nics(terrain, gpus, free, len(gpus), load)
    assert len(found) == len(set(found)) == len(gpus)
    assert nic_key(terrain, gpus, found, free, load) == best_nics(terrain, gpus, free, load)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), snapshot=hosts(gpus=4))
def test_with_more_or_fewer_nics_than_gpus_the_pairs_are_the_best(data: st.DataObject, snapshot: Snapshot) -> None:
    terrain = Terrain(snapshot)
    free = data.draw(st.lists(st.sampled_from(nics_of(snapshot) or ["none"]), unique=True, max_size=6))
    gpus = data.draw(st.lists(st.sampled_from(terrain.gpus), unique=True, min_size=1))
    assume("none" not in free)
    count = data.draw(st.integers(0, len(free)))
    found = match_nics(terrain, gpus, free, count)
    assert len(found) == count
    assert set(found) <= set(free)
    if count <= len(gpus):
        assert pair_keys(terrain, gpus, found) == pair_keys(terrain, gpus, free) or count < min(len(gpus), len(free))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), snapshot=hosts())
def test_no_other_set_of_gpus_is_better(data: st.DataObject, snapshot: Snapshot) -> None:
    terrain = Terrain(snapshot)
    free = data.draw(st.lists(st.sampled_from(terrain.gpus), unique=True, min_size=1))
    must = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=2))
    size = data.draw(st.integers(max(len(must), 1), len(free)))
    nics = data.draw(st.lists(st.sampled_from(nics_of(snapshot) or ["none"]), unique=True, max_size=5))
    nics = [n for n in nics if n != "none"]
    found = choose_gpus(terrain, free, must, size, nics)
    assert len(found) == len(set(found)) == size
    assert found[: len(must)] == tuple(must)
    best = min(gpu_key(terrain, chosen, free, nics) for chosen in gpu_sets(free, must, size))
    assert gpu_key(terrain, found, free, nics) == best


@settings(max_examples=100, deadline=None)
@given(data=st.data(), snapshot=hosts(linked=False))
def test_no_other_choice_of_both_has_better_pairs(data: st.DataObject, snapshot: Snapshot) -> None:
    terrain = Terrain(snapshot)
    gpus = data.draw(st.lists(st.sampled_from(terrain.gpus), unique=True, min_size=1))
    nics = data.draw(st.lists(st.sampled_from(nics_of(snapshot) or ["none"]), unique=True, max_size=5))
    assume("none" not in nics and nics)
    size = data.draw(st.integers(1, min(len(gpus), len(nics))))
    found = choose_pairs(terrain, gpus, nics, size)
    distances = [terrain.distance(g, n) for g, n in found]
    best = min(pair_keys(terrain, chosen, nics) for chosen in gpu_sets(gpus, (), size))
    assert (max(distances), sum(distances)) == best


@settings(max_examples=200, deadline=None)
@given(data=st.data(), drawn=any_terrains(gpus=4))
def test_nics_are_the_best_at_whatever_distances(data: st.DataObject, drawn: tuple[AnyTerrain, list[str]]) -> None:
    terrain, free = drawn
    gpus = data.draw(st.permutations(terrain.gpus))[: min(len(free), data.draw(st.integers(2, 4)))]
    found = match_nics(terrain, gpus, free, len(gpus))
    assert nic_key(terrain, gpus, found, free, {}) == best_nics(terrain, gpus, free, {})


@settings(max_examples=300, deadline=None)
@given(data=st.data(), drawn=any_terrains(gpus=6))
def test_gpus_are_the_best_at_whatever_distances(data: st.DataObject, drawn: tuple[AnyTerrain, list[str]]) -> None:
    terrain, free = drawn
    nics = free[: data.draw(st.integers(0, 4))]
    must = data.draw(st.lists(st.sampled_from(terrain.gpus), unique=True, max_size=1))
    size = data.draw(st.integers(max(len(must), 1), len(terrain.gpus)))
    found = choose_gpus(terrain, terrain.gpus, must, size, nics)
    best = min(gpu_key(terrain, chosen, terrain.gpus, nics) for chosen in gpu_sets(terrain.gpus, must, size))
    assert gpu_key(terrain, found, terrain.gpus, nics) == best
