"""Turns where calls take long, so that those of one network or namespace leave room for others.

Somebody who may write networks can make as many as they like, and let the plugin of each hang. So a network is trusted
once its plugin has answered, and until it is killed. Networks that are not trusted share a part of the turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from agent.errors import DeviceBusy
from agent.process.backoff import Backoff

FRESH_SECONDS = 15.0
"""What the plugin of a network may take that has never answered; twice as long after each time that it was killed."""
REFUSALS = Backoff(first=15.0, longest=120.0)
"""How long a network is refused whose plugin was killed."""
MAX_NETWORKS = 1024
"""So many are remembered: those that were heard of last."""
LOOK_SECONDS = 0.2
Network = Hashable


class NoTurn(DeviceBusy):
    """As many calls are under way as may be; trying again later may help."""


class NotWanted(DeviceBusy):
    """Nobody waits for the call's answer any more."""


def always(*_: object) -> bool:
    """Say that an answer is waited for, or that a network is trusted."""
    return True


@dataclass(frozen=True, slots=True)
class Turn:
    """Who has a turn, or wants one: a kind of work, for one network or several, whose text names them."""

    kind: str
    networks: tuple[Network, ...]
    namespace: str = ""
    """Of the pod; empty if the work is for none."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How many turns there are, and for whom."""

    total: int
    kinds: tuple[str, ...] = ()
    """Of each one turn is kept for networks that have none."""
    untrusted: int = 0
    """So many are for networks that are not trusted, half of them for those of one namespace. 0: all are trusted."""


@dataclass(slots=True)
class _Record:
    has_answered: bool = False
    kills: int = 0
    """Since it answered last."""
    until: float = 0.0
    """It is refused until then."""


class Trust:
    """Which networks' plugins answer, for pods of which namespace. Safe for many threads.

    By namespace, since a network of the same name and `ipam` in another one may be another's, who lets it hang.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._records: dict[tuple[Network, str], _Record] = {}

    def has(self, network: Network, namespace: str) -> bool:
        """Return whether a network is trusted. One that is only a name has no plugin that could hang."""
        record = self._of(network, namespace)
        return isinstance(network, str) or (record.has_answered and not record.kills)

    def note_answer(self, network: Network, namespace: str) -> None:
        """Note that a network's plugin has answered, whatever it said."""
        self._note(network, namespace, _Record(has_answered=True))

    def note_kill(self, network: Network, namespace: str) -> None:
        """Note that a network's plugin was killed: it is refused for some time, longer each time."""
        before = self._of(network, namespace)
        kills = before.kills + 1
        self._note(network, namespace, _Record(before.has_answered, kills, self._clock() + REFUSALS.after(kills)))

    def _of(self, network: Network, namespace: str) -> _Record:
        return self._records.get((network, namespace), _Record())

    def _note(self, network: Network, namespace: str, record: _Record) -> None:
        with self._guard:
            self._records.pop((network, namespace), None)
            self._records[network, namespace] = record
            if len(self._records) > MAX_NETWORKS:
                del self._records[next(iter(self._records))]

    def refused_for(self, network: Network, namespace: str) -> float:
        """Return for how many seconds a network is refused; 0 if it is not."""
        return max(0.0, self._of(network, namespace).until - self._clock())

    def is_refused(self, network: Network) -> bool:
        """Return whether a network is refused in any namespace."""
        with self._guard:
            known = list(self._records)
        return any(self.refused_for(*key) for key in known if key[0] == network)

    def require(self, network: Network, namespace: str) -> None:
        """Raise NoTurn for a network that is refused."""
        if left := self.refused_for(network, namespace):
            raise NoTurn(
                f"network {network}: its plugin hung or took too much and was killed, so it is not asked now: it can be"
                f" asked again in {left:.0f} s"
            )

    def seconds(self, network: Network, namespace: str, most: float) -> float:
        """Return what a network's plugin may take, where one that has answered once may take `most`."""
        record = self._of(network, namespace)
        return most if record.has_answered else Backoff(FRESH_SECONDS, most).after(record.kills + 1)


def too_many(
    held: Sequence[Turn], wanted: Turn, rules: Rules, trusted: Callable[[Network, str], bool] = always
) -> str | None:
    """Say who may have no further turn of this kind; None if all may.

    Networks that are not trusted have their part of the turns, and each namespace half of that. Of the trusted ones no
    network and no namespace may have more than are left free. So however many calls of it wait, another finds room at
    once: the first gets half of all turns, the next one half of the rest.
    """

    def fresh_of(turn: Turn) -> Sequence[Network]:
        return [network for network in turn.networks if rules.untrusted and not trusted(network, turn.namespace)]

    kept = set(rules.kinds) - {wanted.kind} - {turn.kind for turn in held}
    free = rules.total - len(held) - len(kept)
    fresh = [turn for turn in held if fresh_of(turn)]
    if names := fresh_of(wanted):
        mine = sum(turn.namespace == wanted.namespace for turn in fresh)
        if free <= 0 or len(fresh) >= rules.untrusted or mine >= max(1, rules.untrusted // 2):
            return (
                f"network {names[0]}, which has not answered yet or hung when it was asked last, waits for others like"
                f" it: {len(fresh)} of at most {rules.untrusted}, {mine} of them of namespace {wanted.namespace!r},"
            )
        return None
    same = [turn for turn in held if turn.kind == wanted.kind and turn not in fresh]
    for network in wanted.networks:
        if (count := sum(network in turn.networks for turn in same)) >= free:
            return f"network {network} has {count}"
    count = sum(turn.namespace == wanted.namespace for turn in same)
    return f"namespace {wanted.namespace} has {count}" if wanted.namespace and count >= free else None


def wait_for(
    changed: threading.Condition, is_so: Callable[[], bool], seconds: float, is_wanted: Callable[[], bool] = always
) -> bool:
    """Wait so long for what a condition, which the caller holds, tells of. Raises NotWanted."""
    deadline = time.monotonic() + seconds
    while is_wanted():
        if is_so():
            return True
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        changed.wait(min(left, LOOK_SECONDS))
    raise NotWanted("its DEL has come")


class Turns:
    """So many turns. Safe for many threads."""

    def __init__(self, what: str, rules: Rules, trust: Trust | None = None) -> None:
        """`what` says in the plural what holds a turn."""
        self._what = what
        self._rules = rules
        self._trust = trust or Trust()
        self._held: list[Turn] = []
        self._changed = threading.Condition()

    @contextmanager
    def hold(
        self,
        kind: str,
        *networks: Network,
        namespace: str = "",
        seconds: float = 0.0,
        is_wanted: Callable[[], bool] = always,
    ) -> Iterator[None]:
        """Hold a turn, waiting for it at most so long. Raises NoTurn that names who has too many, and NotWanted."""
        wanted = Turn(kind, networks, namespace)
        with self._changed:
            if not wait_for(self._changed, lambda: self._full(wanted) is None, seconds, is_wanted):
                raise NoTurn(self._reason(wanted, seconds))
            self._held.append(wanted)
        try:
            yield
        finally:
            with self._changed:
                self._held.remove(wanted)
                self._changed.notify_all()

    def _full(self, wanted: Turn) -> str | None:
        return too_many(self._held, wanted, self._rules, self._trust.has)

    def _reason(self, wanted: Turn, seconds: float) -> str:
        waited = f" after {seconds:g} s" if seconds else ""
        return (
            f"{self._full(wanted) or f'network {wanted.networks[0]} has too many'} {self._what}{waited} (the node"
            f" {len(self._held)} of at most {self._rules.total}); the rest is reserved for other networks: try again"
            " later"
        )
