"""Places where calls take long, so that those of one network leave room for another's."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from agent.errors import DeviceBusy


class NoPlace(DeviceBusy):
    """As many calls are under way as may be; trying again later may help."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a place, or wants one: a kind of work, for one network or several, whose text names them."""

    kind: str
    networks: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """How many places there are, and for whom."""

    total: int
    kinds: tuple[str, ...] = ()
    """Of each one place is kept for networks that have none."""
    together: Collection[Hashable] = ()
    """Networks that count as one."""


def full_network(held: Sequence[Holder], wanted: Holder, rules: Rules) -> Hashable | None:
    """Tell a network that may have no further place of this kind; None if all may.

    One network may have no more than are left free. So however many calls of it wait, another finds room at once: the
    first network gets half of all places, the next one half of the rest.
    """
    kept = set(rules.kinds) - {wanted.kind} - {holder.kind for holder in held}
    free = rules.total - len(held) - len(kept)
    return next((network for network in wanted.networks if _count(held, wanted.kind, network, rules) >= free), None)


def _count(held: Sequence[Holder], kind: str, network: Hashable, rules: Rules) -> int:
    same = [holder for holder in held if holder.kind == kind]
    if network in rules.together:
        return sum(any(name in rules.together for name in holder.networks) for holder in same)
    return sum(network in holder.networks for holder in same)


class Places:
    """So many places. Safe for many threads."""

    def __init__(self, what: str, rules: Rules) -> None:
        """`what` says in the plural what holds a place. The rules' networks may change."""
        self._what = what
        self._rules = rules
        self._held: list[Holder] = []
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, kind: str, *networks: Hashable, seconds: float = 0.0) -> Iterator[None]:
        """Hold a place, waiting for it at most so long. Raises NoPlace that names the network which has too many."""
        wanted = Holder(kind, networks)
        with self._changed:
            if not self._changed.wait_for(lambda: self._full(wanted) is None, seconds):
                raise NoPlace(self._reason(wanted, seconds))
            self._held.append(wanted)
        try:
            yield
        finally:
            with self._changed:
                self._held.remove(wanted)
                self._changed.notify_all()

    def _full(self, wanted: Holder) -> Hashable | None:
        return full_network(self._held, wanted, self._rules)

    def _reason(self, wanted: Holder, seconds: float) -> str:
        network = self._full(wanted) or wanted.networks[0]
        count = _count(self._held, wanted.kind, network, self._rules)
        waited = f" after {seconds:g} s" if seconds else ""
        return (
            f"network {network} has {count} {self._what}{waited} (the node {len(self._held)} of at most"
            f" {self._rules.total}), and others are to find room: try again later"
        )
