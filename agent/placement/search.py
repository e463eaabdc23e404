"""The best set among many: depth first, leaving out what cannot beat the best one so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent.placement.choices import Choices
from agent.placement.distances import FINE

Key = tuple[int, int, int, int]
"""What a set costs: shared GPUs and missing NVLinks, the worst pair's locality, the sum of spans, all the rest."""
SEEDS = 4
MATCHING_STEPS = 20
"""How many steps of the search take as long as one matching."""


def search(choices: Choices, steps: int) -> tuple[int, ...]:
    """Find how many units of each group make the best set. After `steps`, the best one so far."""
    return _Search(choices, steps).run()


class _Sum:
    """A set under construction, with what one more unit of each group would add to its cost."""

    def __init__(self, choices: Choices) -> None:
        self._c = choices
        self.counts = [0] * len(choices.groups)
        self.left = choices.size
        self.first = self.last = 0
        self.more_first = [0] * len(choices.groups)
        self.more_last = [group.alone for group in choices.groups]

    def change(self, group: int, by: int) -> None:
        """Take units of a group, or give them back."""
        # n units more cost n times what one costs, and what they cost each other; giving back is its reverse.
        if by < 0:
            self._spread(group, by)
        pairs = abs(by) * (abs(by) - 1) // 2
        sign = 1 if by > 0 else -1
        self.first += by * self.more_first[group] + sign * pairs * self._c.first[group][group]
        self.last += by * self.more_last[group] + sign * pairs * self._c.last[group][group]
        if by > 0:
            self._spread(group, by)
        self.counts[group] += by
        self.left -= by

    def _spread(self, group: int, by: int) -> None:
        first, last = self._c.first[group], self._c.last[group]
        for g in range(len(self.counts)):
            self.more_first[g] += by * first[g]
            self.more_last[g] += by * last[g]


class _Least:
    """The least that units still to be taken can add to one number of a cost."""

    def __init__(self, pairs: Sequence[Sequence[int]], units: Sequence[int]) -> None:
        self._pairs = pairs
        self._units = units
        self._among: dict[tuple[int, int], list[int]] = {}

    def added(self, more: Sequence[int], begin: int, left: int) -> int:
        """Give a lower bound for `left` units of the groups from `begin` on. `more` is what one adds to those taken.

        Each unit counts half of what it costs with each of its `left - 1` cheapest companions.
        """
        among = self._among.get((begin, left))
        if among is None:
            among = self._among[begin, left] = [self._cheapest(g, begin, left - 1) for g in range(begin, len(more))]
        doubled = [
            2 * more[g] + pairs for g, pairs in enumerate(among, begin) for _ in range(min(self._units[g], left))
        ]
        return -(-sum(sorted(doubled)[:left]) // 2)

    def _cheapest(self, group: int, begin: int, count: int) -> int:
        costs = self._pairs[group]
        found = [costs[g] for g in range(begin, len(costs)) for _ in range(min(self._units[g] - (g == group), count))]
        return sum(sorted(found)[:count])


class _Search:
    def __init__(self, choices: Choices, steps: int) -> None:
        self._c = choices
        self._steps = steps
        self._groups = choices.groups
        self._most = [g.units for g in choices.groups]
        self._units_from = [sum(self._most[i:]) for i in range(len(self._most) + 1)]
        self._first = _Least(choices.first, self._most)
        self._last = _Least(choices.last, self._most)
        self._near_from = [min(g.nearest for g in choices.groups[i:]) for i in range(len(self._most))]
        self._each = choices.each
        self._all_paired = choices.pairs == choices.size * choices.each
        self._best: tuple[int, ...] = ()
        self._key: Key | None = None

    def run(self) -> tuple[int, ...]:
        for total in self._grown():
            self._offer(total)
        self._descend(_Sum(self._c), 0, 0, 0)
        return self._best

    def _grown(self) -> Iterator[_Sum]:
        """Grow sets from good beginnings, always by the unit that then costs least."""
        groups, near = self._groups, self._c.pairs > 0
        seeds = sorted(range(len(groups)), key=lambda g: (near and groups[g].nearest, groups[g].alone, g))
        beginnings = [tuple(int(g == seed) for g in range(len(groups))) for seed in seeds[:SEEDS]]
        beginnings += [counts for counts in (self._c.bounding, self._c.claiming) if counts]
        for beginning in beginnings:
            total = _Sum(self._c)
            for g, group in enumerate(groups):
                if group.taken:
                    total.change(g, group.taken)
            for g, count in enumerate(beginning):
                if (more := min(count - total.counts[g], total.left)) > 0:
                    total.change(g, more)
            while total.left:
                total.change(
                    min(
                        (g for g, n in enumerate(total.counts) if n < self._most[g]),
                        key=lambda g: (total.more_first[g], near and groups[g].nearest, total.more_last[g]),
                    ),
                    1,
                )
            yield total

    def _offer(self, total: _Sum) -> None:
        key = (total.first, *self._c.matched(total.counts), total.last)
        if self._key is None or key < self._key:
            self._best, self._key = tuple(total.counts), key

    def _descend(self, total: _Sum, group: int, worst: int, near: int) -> None:
        """Try all numbers of this group's units, and of the later ones'."""
        if not total.left:
            if all(n >= g.taken for n, g in zip(total.counts, self._groups, strict=True)):
                self._offer(total)
            return
        if (
            self._steps <= MATCHING_STEPS * self._c.matchings
            or self._units_from[group] < total.left
            or not self._promises(total, group, worst, near)
        ):
            return
        self._steps -= 1
        here = self._groups[group]
        for count in range(min(self._most[group], total.left), here.taken - 1, -1):
            if count:
                total.change(group, count)
            nearest = here.nearest // FINE
            self._descend(
                total, group + 1, max(worst, nearest) if count else worst, near + count * self._each * here.nearest
            )
            if count:
                total.change(group, -count)

    def _promises(self, total: _Sum, group: int, worst: int, near: int) -> bool:
        """Tell whether a set that begins so can be better than the best one so far."""
        assert self._key is not None  # that of a grown set, at least
        left = total.left
        first = total.first + self._first.added(total.more_first, group, left)
        if first != self._key[0]:
            return first < self._key[0]
        least_worst, least_sum = self._c.bound
        if self._all_paired:
            least_worst = max(least_worst, worst, self._near_from[group] // FINE)
            least_sum = max(least_sum, near + left * self._each * self._near_from[group])
        if not self._betters(total, group, (least_worst, least_sum)):
            return False
        if not (self._all_paired and self._c.contended and left < self._c.size):
            return True
        matched_worst, matched_sum = self._c.matched(total.counts)
        least_worst = max(least_worst, matched_worst)
        least_sum = max(least_sum, matched_sum + left * self._each * self._near_from[group])
        return self._betters(total, group, (least_worst, least_sum))

    def _betters(self, total: _Sum, group: int, pairs: tuple[int, int]) -> bool:
        """Tell whether a set with pairs that are at best so, and as good in what comes before them, can be better."""
        assert self._key is not None
        if pairs != self._key[1:3]:
            return pairs < self._key[1:3]
        return total.last + self._last.added(total.more_last, group, total.left) < self._key[3]
