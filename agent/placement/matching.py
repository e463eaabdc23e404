"""An exact matching of rows to columns with room for several, by the shortest augmenting path.

Minimum-cost flow in the form of Jonker and Volgenant (1987), with a column's price rising unit by unit:
each row is added by the cheapest chain of moves, and the result after each is a minimum for the rows so
far (Ahuja, Magnanti, Orlin: Network Flows, section 9.7; convex costs: section 14.4).
"""

from __future__ import annotations

from collections.abc import Sequence

Costs = Sequence[Sequence[int | None]]
"""By row and column; None: not allowed."""


def assign(costs: Costs, prices: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Assign each row to a column at the least total cost; None if not all of them find one.

    `prices[c]` are what the first, second … row on column c costs on top, not falling; as many rows as
    there are prices fit. Of equal results the one with lower columns for lower rows is likely, and
    the same always comes from the same arguments.
    """
    place: list[int] = []
    rows_on: list[list[int]] = [[] for _ in prices]
    for row in range(len(costs)):
        path = _shortest(row, costs, prices, rows_on)
        if path is None:
            return None
        place.append(-1)
        for moved, column in path:
            if place[moved] >= 0:
                rows_on[place[moved]].remove(moved)
            place[moved] = column
        for moved, column in path:
            rows_on[column].append(moved)
    return tuple(place)


def _shortest(
    row: int, costs: Costs, prices: Sequence[Sequence[int]], rows_on: Sequence[Sequence[int]]
) -> list[tuple[int, int]] | None:
    """Find the cheapest chain: the row goes to a column, whose row goes to another …, the last one has room."""
    reach: list[int | None] = list(costs[row])
    mover = [row] * len(prices)
    """Which row enters the column on the cheapest way to it."""
    pending = [c for c, cost in enumerate(reach) if cost is not None]
    best: int | None = None
    end = -1
    # Bellman and Ford, since a move can be a gain. A chain never enters a column twice: there are no negative
    # cycles while the rows so far stand at a minimum.
    while pending:
        following: list[int] = []
        for column in pending:
            here = reach[column]
            assert here is not None
            full = len(rows_on[column]) == len(prices[column])
            if not full:
                total = here + prices[column][len(rows_on[column])]
                if best is None or total < best or (total == best and column < end):
                    best, end = total, column
            for other in rows_on[column]:
                leaving = costs[other]
                gone = leaving[column]
                assert gone is not None
                for target, cost in enumerate(leaving):
                    if cost is None or target == column:
                        continue
                    there = here - gone + cost
                    known = reach[target]
                    if known is None or there < known:
                        reach[target], mover[target] = there, other
                        if target not in following:
                            following.append(target)
        pending = following
    if best is None:
        return None
    path = []
    column = end
    while (moved := mover[column]) != row:
        path.append((moved, column))
        column = next(c for c, rows in enumerate(rows_on) if moved in rows)
    path.append((row, column))
    return path
