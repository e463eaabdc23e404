"""Random lives of a pool: slices change, are wiped, writes break off. What the scheduler sees is right throughout."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from agent.cluster.slice_plan import Batch, StoredSlice, Wanted, contents_of, document_of, plan, stored_of, wanted_of
from tests.agent.cluster.slice_documents import pool_slice

NODE = {"name": "n", "uid": "node-uid"}
DEVICES = [f"vf-{number}" for number in range(6)]


class Life:
    """A pool at the server, and a publisher that may be killed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.server: dict[str, dict[str, Any]] = {}
        self.batch = Batch()
        self.version = 0
        self.wanted: tuple[Wanted, ...] = ()
        self.said: set[frozenset[str]] = {frozenset()}
        """Sets of devices that were wanted at some time."""

    def want(self) -> None:
        """Divide some devices among some slices."""
        count = self.chance.randint(1, 3)
        here = [name for name in DEVICES if self.chance.random() < 0.8] or DEVICES[:1]
        parts: list[list[str]] = [[] for _ in range(count)]
        for name in here:
            self.chance.choice(parts).append(name)
        self.wanted = wanted_of([pool_slice(number, count, part) for number, part in enumerate(parts)])
        self.said.add(frozenset(here))

    def change_one(self) -> None:
        """Give one slice other devices that no slice has, or take some away."""
        documents = [dict(one.document) for one in self.wanted]
        at = self.chance.randrange(len(documents))
        had = [device["name"] for number, d in enumerate(documents) if number != at for device in d["spec"]["devices"]]
        free = [name for name in DEVICES if name not in had and self.chance.random() < 0.5]
        documents[at] = pool_slice(at, len(documents), free)
        self.wanted = wanted_of(documents)
        self.said.add(frozenset(had + free))

    @property
    def stored(self) -> dict[str, StoredSlice]:
        return {name: stored_of(item) for name, item in self.server.items()}

    def write(self, breaks_off: bool) -> bool:
        """Carry a plan out, perhaps not to its end. Tells whether there was anything to do."""
        made = plan(self.wanted, self.stored, "node-uid", self.batch, {})
        if made.is_nothing:
            return False
        if made.writes:
            self.batch = Batch(made.generation, contents_of(self.wanted))
        left = self.chance.randrange(len(made.writes) + 1) if breaks_off else len(made.writes)
        for one in made.writes[:left]:
            self.version += 1
            document = document_of(one, made.generation, NODE, {})
            metadata = {**document["metadata"], "uid": one.name, "resourceVersion": str(self.version)}
            self.server[one.name] = {**document, "metadata": metadata}
            self.look()
        if left == len(made.writes):
            for gone in made.deletes:
                del self.server[gone.name]
                self.look()
        return True

    def wipe(self) -> None:
        for name in [name for name in self.server if self.chance.random() < 0.7]:
            del self.server[name]

    def settle(self) -> None:
        """Let the publisher come to its end: then the pool is all there."""
        while self.write(breaks_off=False):
            pass
        wanted = {one.name: one.content for one in self.wanted}
        assert {name: one.content for name, one in self.stored.items()} == wanted
        assert len({one.generation for one in self.stored.values()}) == 1

    def look(self) -> None:
        """Look at the pool as the scheduler does: at its newest generation, and only if it is all there."""
        pools = [(item["spec"]["pool"], item["spec"]["devices"]) for item in self.server.values()]
        if not pools:
            return
        newest = max(pool["generation"] for pool, _ in pools)
        now = [(pool, devices) for pool, devices in pools if pool["generation"] == newest]
        assert len({pool["resourceSliceCount"] for pool, _ in now}) == 1
        if len(now) == now[0][0]["resourceSliceCount"]:
            names = Counter(device["name"] for _, devices in now for device in devices)
            assert set(names.values()) <= {1}, "a device is in two slices"
            assert frozenset(names) in self.said, "the pool was never wanted like this"


@pytest.mark.parametrize("seed", range(60))
def test_a_pool_that_is_all_there_is_always_one_that_was_wanted(seed: int) -> None:
    life = Life(seed)
    life.want()
    for _ in range(80):
        event = life.chance.random()
        if event < 0.15:
            life.want()
        elif event < 0.5:
            life.change_one()
        elif event < 0.55:
            life.wipe()
        elif event < 0.65:
            life.batch = Batch()  # the agent starts anew
        elif event < 0.8:
            life.settle()
        else:
            life.write(breaks_off=True)
    life.settle()
