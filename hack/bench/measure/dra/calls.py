"""kubelet's two calls over the driver's socket, on the node with 1,024 VFs: alone, again, and for 16 pods at once.

Other pods have claims meanwhile. No hardware is touched: that is ADD's work.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from agent.ledger import Ledger
from agent.ledger.database import read_books
from agent.model.allocation import ClaimState
from hack.sim.stage import wait
from measure.dra.cluster import Cluster, Driver, prepared
from measure.dra.node import RunningNode
from measure.figures import Figures, quantile, spread
from proto.dra.v1 import api_pb2

AT_ONCE = 16
OTHERS = 64
"""Claims of other pods, prepared all the time."""
WARM_CALLS = 5
BOOK_ROUNDS = 5

Say = Callable[[str], None]


def measure(node: RunningNode, resource: str, kind: str, calls: int, rounds: int, say: Say) -> Figures:
    """Prepare claims for a resource: `calls` one by one, each twice, then `rounds` of 16 at once.

    The figures' names begin with `kind`. The others' claims stay.
    """
    say(f"claims: {calls} calls one by one, {rounds} rounds of {AT_ONCE} at once, beside {OTHERS} other claims")
    # kubelet's stand-in wipes the slices once, shortly after it has registered the driver.
    published = wait("the devices", lambda: (node.cluster.is_whole() and node.cluster.devices(resource)) or None)
    pods = _Pods(node.cluster, published)
    with closing(Driver(node.stage.folder / "kubelet")) as driver:
        for _ in range(OTHERS):
            driver.prepare(pods.claim())
        first, again, unprepare = [], [], []
        for number in range(-WARM_CALLS, calls):
            claim = pods.claim()
            began = time.perf_counter()
            devices = driver.prepare(claim)
            answered = time.perf_counter()
            same = driver.prepare(claim)
            repeated = time.perf_counter()
            driver.unprepare(claim)
            ended = time.perf_counter()
            if devices != same:
                raise RuntimeError(f"claim {claim.name} got {devices}, and then {same}")
            pods.end(claim)
            if number >= 0:
                first.append(answered - began)
                again.append(repeated - answered)
                unprepare.append(ended - repeated)
        crowds = [_crowd(driver, pods) for _ in range(1 + rounds)][1:]
    return {
        **spread(f"{kind}prepare", _ms(first)),
        **spread(f"{kind}prepared_again", _ms(again)),
        **spread(f"{kind}unprepare", _ms(unprepare)),
        **spread(f"{kind}prepare_16", _ms(itertools.chain.from_iterable(crowds))),
    }


def books(state: Path, say: Say) -> Figures:
    """Write once more, into books of our own on the same disk, what the agent has written of claims, and time that.

    `state` is the agent's folder. What is timed is both writes of a Prepare: *preparing*, and *prepared*.
    """
    claims = read_books(state / "ledger.db").claims
    say(f"claims: the books of {len(claims)} claims")
    sample = []
    with closing(Ledger.open(state / "bench.db", "boot")) as ledger:
        for claim in claims:
            ledger.prepare_claim(claim)
        for claim in claims * BOOK_ROUNDS:
            ledger.remove_claim(claim.ref.uid)
            began = time.perf_counter()
            ledger.prepare_claim(claim)
            ledger.set_claim_state(claim.ref.uid, ClaimState.PREPARED)
            sample.append(time.perf_counter() - began)
    milliseconds = _ms(sample)
    return {"books_ms": quantile(milliseconds, 0.5), "books_p99_ms": quantile(milliseconds, 0.99)}


class _Pods:
    """Pods with a claim each, that were never there before."""

    def __init__(self, cluster: Cluster, devices: Sequence[Mapping[str, Any]]) -> None:
        self._cluster = cluster
        self._devices = itertools.cycle(devices)
        self._names: Iterator[str] = (f"pod-{number}" for number in itertools.count())

    def claim(self) -> api_pb2.Claim:
        """Have the next pod's claim allocated."""
        name = next(self._names)
        return self._cluster.allocate(name, next(self._devices), {"name": name, "uid": f"uid-of-{name}"})

    def end(self, claim: api_pb2.Claim) -> None:
        """Have it gone."""
        self._cluster.remove(claim.name)


def _crowd(driver: Driver, pods: _Pods) -> list[float]:
    """Have the claims of 16 pods prepared at once, each by a call of its own: the seconds of each."""
    claims = [pods.claim() for _ in range(AT_ONCE)]
    ended: dict[str, float] = {}
    calls = {}
    began = {}
    for claim in claims:
        began[claim.uid] = time.perf_counter()
        calls[claim.uid] = call = driver.begin_to_prepare(claim)
        call.add_done_callback(lambda _, uid=claim.uid: ended.setdefault(uid, time.perf_counter()))
    for claim in claims:
        prepared(claim, calls[claim.uid].result())
    while len(ended) < len(claims):
        time.sleep(0.001)
    driver.unprepare(*claims)
    for claim in claims:
        pods.end(claim)
    return [ended[claim.uid] - began[claim.uid] for claim in claims]


def _ms(seconds: Any) -> list[float]:
    return [value * 1000 for value in seconds]
