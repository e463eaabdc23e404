from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.placement.matching import Costs, assign


def test_nothing_is_assigned_to_nothing() -> None:
    assert assign([], []) == ()
    assert assign([], [[0]]) == ()


def test_a_row_without_a_column_makes_it_impossible() -> None:
    assert assign([[None, None]], [[0], [0]]) is None
    assert assign([[1], [1]], [[0]]) is None


def test_a_row_gives_way_to_one_that_has_no_other_column() -> None:
    assert assign([[0, 1], [0, None]], [[0], [0]]) == (1, 0)


def test_a_chain_of_rows_gives_way() -> None:
    costs = [[0, 1, None], [None, 0, 1], [0, None, None]]
    assert assign(costs, [[0], [0], [0]]) == (1, 2, 0)


def test_rising_prices_spread_the_rows() -> None:
    assert Counter(assign([[0, 0]] * 4, [[0, 1, 2, 3]] * 2) or ()) == {0: 2, 1: 2}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_total_is_the_least_that_there_is(data: st.DataObject) -> None:
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
