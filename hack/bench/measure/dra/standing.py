"""How soon the cluster knows of a node again, and what it hears of one where nothing happens. With 1,024 VFs."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hack.sim.stage import wait
from measure.dra.cluster import Cluster
from measure.dra.node import RunningNode, registrations
from measure.figures import Figures, quantile

LOOK_SECONDS = 1.0
"""kubelet's own time between two looks for plugins."""
POLL_SECONDS = 0.002
LIMIT_SECONDS = 30.0
SETTLE_SECONDS = 5.0
HOUR = 3600.0

Say = Callable[[str], None]


def wiped(cluster: Cluster, times: int, say: Say) -> Figures:
    """Delete all slices again and again, as kubelet does at its start, and time how soon all are back."""
    say(f"slices: {times} times wiped")
    sample = []
    for _ in range(times):
        time.sleep(SETTLE_SECONDS)
        before, applies = cluster.slices(), cluster.applies()
        began = time.perf_counter()
        cluster.wipe()
        # The slices are large, and listing them takes time from who writes them: they are counted meanwhile.
        _await("the slices", cluster.applies, applies + len(before))
        sample.append(time.perf_counter() - began)
        if [found["spec"]["devices"] for found in cluster.slices()] != [found["spec"]["devices"] for found in before]:
            raise RuntimeError("other slices are back than were there")
    return {"slices_back_after_wipe_s": quantile(sample, 0.5), "slices_back_after_wipe_p99_s": quantile(sample, 0.99)}


def steady(cluster: Cluster, seconds: float, say: Say) -> Figures:
    """Count writes while nothing happens, for `seconds`, and scale them to an hour."""
    say(f"API server: {seconds:g} s in which nothing happens")
    time.sleep(SETTLE_SECONDS)
    before = cluster.writes()
    time.sleep(seconds)
    written = cluster.writes() - before
    return {"steady_writes_per_hour": written * HOUR / seconds, "steady_counted_s": seconds}


def restarted(node: RunningNode, times: int, say: Say) -> Figures:
    """End the agent, start it at any moment of kubelet's looking, and time how soon kubelet has registered it."""
    say(f"registration: {times} starts of the agent, beside a kubelet that looks each {LOOK_SECONDS:g} s")
    compiled = {"PYTHONPYCACHEPREFIX": str(node.stage.folder / "pycache"), "PYTHONDONTWRITEBYTECODE": ""}
    sample = []
    for _ in range(1 + times):  # the first start compiles, as the image's Python is compiled
        log = node.stage.folder / "kubelet.log"
        with _more_of(log, "is gone"):
            node.stage.end("agent", signal.SIGTERM)
        time.sleep(random.uniform(0, LOOK_SECONDS))
        before = registrations(node.stage)
        began = time.perf_counter()
        node.start_agent(compiled)
        _await("the registration", partial(registrations, node.stage), before + 1)
        sample.append(time.perf_counter() - began)
        node.stage.await_ready()
    sample = sample[1:]
    return {
        "registered_after_restart_s": quantile(sample, 0.5),
        "registered_after_restart_p99_s": quantile(sample, 0.99),
    }


@contextmanager
def _more_of(log: Path, text: str) -> Iterator[None]:
    """Do something, and wait until a log tells of it."""
    before = log.read_text().count(text)
    yield
    wait(f"{log.name} to say that something {text}", lambda: log.read_text().count(text) > before or None)


def _await(what: str, count: Callable[[], int], wanted: int) -> None:
    deadline = time.perf_counter() + LIMIT_SECONDS
    while count() < wanted:
        if time.perf_counter() > deadline:
            raise RuntimeError(f"gave up waiting for {what} after {LIMIT_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
