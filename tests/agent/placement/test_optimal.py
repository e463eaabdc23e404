"""Placement against brute force: no choice is better than the one that is made."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent.model.device import NO_NUMA_NODE, Snapshot
from agent.placement import Distances, Group, choose_gpus, choose_pairs, match_groups, match_nics
from agent.placement.nics import Costs, assign
from tests.agent.placement.brute import best_nics, gpu_key, gpu_sets, nic_key, pair_keys, pairs_key, shared_out
from tests.agent.placement.hosts import AnyDistances, any_distances, hosts


def nics_of(snapshot: Snapshot) -> list[str]:
    """List what can be taken: VFs, and adapters without VFs."""
    return [d.address for d in snapshot.devices if d.pci_class == 0x020000 and (d.is_vf or not d.sriov_totalvfs)]


@st.composite
def situations(draw: st.DrawFn, *, gpus: int = 4) -> tuple[Distances, list[str]]:
    """Draw a host with distances of a tree or any at all, and what can be taken there: at least a name of nothing."""
    if draw(st.booleans()):
        return draw(any_distances(gpus=gpus))
    snapshot = draw(hosts(gpus=gpus))
    return Distances(snapshot), nics_of(snapshot) or ["none"]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), drawn=situations())
def test_no_other_choice_of_nics_is_better(data: st.DataObject, drawn: tuple[Distances, list[str]]) -> None:
    distances, nics = drawn
    free = data.draw(st.lists(st.sampled_from(nics), unique=True, max_size=6))
    gpus = data.draw(st.lists(st.sampled_from(distances.gpus), unique=True, min_size=1))
    assume(len(free) >= len(gpus) and "none" not in free)
    load = {distances.port(n): data.draw(st.integers(0, 3)) for n in free}
    found = match_nics(distances, gpus, free, len(gpus), load)
    assert len(found) == len(set(found)) == len(gpus)
    assert nic_key(distances, gpus, found, free, load) == best_nics(distances, gpus, free, load)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), snapshot=hosts(gpus=4))
def test_with_more_or_fewer_nics_than_gpus_the_pairs_are_the_best(data: st.DataObject, snapshot: Snapshot) -> None:
    distances = Distances(snapshot)
    free = data.draw(st.lists(st.sampled_from(nics_of(snapshot) or ["none"]), unique=True, max_size=6))
    gpus = data.draw(st.lists(st.sampled_from(distances.gpus), unique=True, min_size=1))
    assume("none" not in free)
    count = data.draw(st.integers(0, len(free)))
    found = match_nics(distances, gpus, free, count)
    assert len(found) == count
    assert set(found) <= set(free)
    if count <= len(gpus):
        assert pair_keys(distances, gpus, found) == pair_keys(distances, gpus, free) or count < min(
            len(gpus), len(free)
        )


@settings(max_examples=400, deadline=None)
@given(data=st.data(), drawn=situations(gpus=6))
def test_no_other_set_of_gpus_is_better(data: st.DataObject, drawn: tuple[Distances, list[str]]) -> None:
    distances, every = drawn
    free = data.draw(st.lists(st.sampled_from(distances.gpus), unique=True, min_size=1))
    must = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=2))
    size = data.draw(st.integers(max(len(must), 1), len(free)))
    nics = [n for n in data.draw(st.lists(st.sampled_from(every), unique=True, max_size=5)) if n != "none"]
    found = choose_gpus(distances, free, must, size, nics)
    assert len(found) == len(set(found)) == size
    assert found[: len(must)] == tuple(must)
    best = min(gpu_key(distances, chosen, free, nics) for chosen in gpu_sets(free, must, size))
    assert gpu_key(distances, found, free, nics) == best


@settings(max_examples=100, deadline=None)
@given(data=st.data(), snapshot=hosts())
def test_no_other_choice_of_both_has_better_pairs(data: st.DataObject, snapshot: Snapshot) -> None:
    distances = Distances(snapshot)
    gpus = data.draw(st.lists(st.sampled_from(distances.gpus), unique=True, min_size=1))
    nics = data.draw(st.lists(st.sampled_from(nics_of(snapshot) or ["none"]), unique=True, max_size=5))
    assume("none" not in nics and nics)
    size = data.draw(st.integers(1, min(len(gpus), len(nics))))
    found = choose_pairs(distances, gpus, nics, size)
    best = min(pair_keys(distances, chosen, nics) for chosen in gpu_sets(gpus, (), size))
    assert pairs_key(distances, found) == best


@settings(max_examples=150, deadline=None)
@given(data=st.data(), drawn=any_distances(gpus=4))
def test_no_other_choice_is_better_for_several_containers_with_ratios_of_their_own(
    data: st.DataObject, drawn: tuple[AnyDistances, list[str]]
) -> None:
    distances, free = drawn
    free = free[:5]
    gpus = data.draw(st.permutations(distances.gpus))
    cut = data.draw(st.integers(1, len(gpus) - 1))
    parts = [tuple(gpus[:cut]), tuple(gpus[cut:])]
    first = data.draw(st.integers(0, len(free)))
    counts = [first, data.draw(st.integers(0, len(free) - first))]
    found = match_groups(
        distances,
        [Group((NO_NUMA_NODE,) * n, g) for g, n in zip(parts, counts, strict=True)],
        dict.fromkeys(free, 0),
        {},
    )
    assert found is not None
    assert [len(mine) for mine in found] == counts
    assert len({nic for mine in found for nic in mine}) == sum(counts)
    got = [shared_out(distances, [(g, n)], mine) for g, n, mine in zip(parts, counts, found, strict=True)]
    groups = list(zip(parts, counts, strict=True))
    assert (max(worst for worst, _ in got), sum(total for _, total in got)) == shared_out(distances, groups, free)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), drawn=any_distances(gpus=5))
def test_no_other_set_of_gpus_has_better_pairs_with_several_nics_or_less_than_one_each(
    data: st.DataObject, drawn: tuple[AnyDistances, list[str]]
) -> None:
    distances, free = drawn
    free = free[:5]
    size = data.draw(st.integers(1, min(3, len(distances.gpus))))
    nics = data.draw(st.integers(1, len(free)))
    found = choose_gpus(distances, distances.gpus, (), size, free, nics=nics)

    def key(gpus: tuple[str, ...]) -> tuple[int, tuple[int, int]]:
        return -sum(distances.links(a, b) for a, b in combinations(gpus, 2)), shared_out(
            distances, [(gpus, nics)], free
        )

    assert key(found) == min(key(gpus) for gpus in gpu_sets(distances.gpus, (), size))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_other_matching_of_rows_to_columns_costs_less(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    cost = st.one_of(st.none(), st.integers(-4, 9))
    costs = data.draw(st.lists(st.lists(cost, min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    rising = st.lists(st.integers(-9, 9), max_size=3).map(sorted)
    prices = data.draw(st.lists(rising, min_size=columns, max_size=columns))
    found = assign(costs, prices)
    totals = [
        total for choice in product(range(columns), repeat=rows) if (total := _total(costs, prices, choice)) is not None
    ]
    assert (found is None) == (not totals)
    if found is not None:
        assert _total(costs, prices, found) == min(totals)


def _total(costs: Costs, prices: list[list[int]], choice: tuple[int, ...]) -> int | None:
    total = 0
    used: Counter[int] = Counter()
    for row, column in enumerate(choice):
        cost = costs[row][column]
        if cost is None or used[column] == len(prices[column]):
            return None
        total += cost + prices[column][used[column]]
        used[column] += 1
    return total
