"""What has to be written, and as which generation."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from agent.cluster.slice_plan import (
    Batch,
    Change,
    Plan,
    StoredSlice,
    Wanted,
    change,
    contents_of,
    document_of,
    plan,
    stored_of,
    wanted_of,
)
from tests.agent.cluster.slice_publishing import DOWN, pool, pool_slice, tainted

NOTHING_SAME: dict[str, str] = {}


def stored(*documents: dict[str, Any], generation: int = 4, owner: str = "node-uid") -> dict[str, StoredSlice]:
    """Those slices as they stand at the server."""
    node = {"name": "n", "uid": owner}
    items = [document_of(one, generation, node, {}) for one in wanted_of(documents)]
    for number, item in enumerate(items):
        item["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": "7"}
    return {item["metadata"]["name"]: stored_of(item) for item in items}


def planned(
    documents: tuple[dict[str, Any], ...],
    found: dict[str, StoredSlice],
    batch: Batch | None = None,
    same: dict[str, str] = NOTHING_SAME,
) -> tuple[int, list[str], list[str]]:
    made: Plan = plan(wanted_of(documents), found, "node-uid", batch or Batch(), same)
    return made.generation, [one.name for one in made.writes], [one.name for one in made.deletes]


THREE, TWO = pool(3), pool(2)
OTHER, ANOTHER = pool_slice(0, 3, ["vf-8"]), pool_slice(1, 3, ["vf-9"])
BATCH = Batch(5, contents_of(wanted_of(THREE)))
CUT_SHORT = stored(*TWO) | stored(THREE[2], generation=5)


@pytest.mark.parametrize(
    ("wanted", "found", "batch", "writes", "deletes"),
    [
        pytest.param(THREE, stored(*THREE), None, (4, ""), "", id="all is there"),
        pytest.param(TWO, {}, None, (1, "01"), "", id="nothing is there"),
        pytest.param((OTHER, *THREE[1:]), stored(*THREE), None, (4, "0"), "", id="one differs"),
        pytest.param(THREE, stored(THREE[0], THREE[2]), None, (4, "1"), "", id="one is missing"),
        pytest.param((OTHER, ANOTHER, THREE[2]), stored(*THREE), None, (5, "012"), "", id="several differ"),
        pytest.param(THREE, stored(*TWO), None, (5, "012"), "", id="one more"),
        pytest.param(pool(1), stored(*TWO), None, (5, "0"), "1", id="one less"),
        pytest.param((), stored(*TWO), None, (4, ""), "01", id="none is wanted"),
        pytest.param(
            TWO, stored(*TWO) | stored(pool_slice(9, 1, ["vf-9"]), generation=3), None, (4, ""), "9", id="old"
        ),
        pytest.param(THREE, {}, BATCH, (5, "012"), "", id="wiped: comes back as what it was"),
        pytest.param((OTHER, *THREE[1:]), {}, BATCH, (6, "012"), "", id="wiped and changed since"),
        pytest.param(THREE, CUT_SHORT, BATCH, (5, "01"), "", id="a batch that was cut short"),
        pytest.param(THREE, CUT_SHORT, None, (6, "012"), "", id="another agent's, cut short"),
        pytest.param(pool(1), stored(*pool(1), owner="of-before"), None, (4, "0"), "", id="of another Node object"),
    ],
)
def test_what_is_written_as_which_generation_and_deleted(
    wanted: Any, found: dict[str, StoredSlice], batch: Batch | None, writes: tuple[int, str], deletes: str
) -> None:
    assert planned(wanted, found, batch) == (writes[0], list(writes[1]), list(deletes))


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (pool(1), pool(1), Change.NOTHING),
        (pool(1), pool(2), Change.STRUCTURE),
        (pool(1), (tainted(pool(1)[0], "vf-0", DOWN),), Change.LINK),
        ((tainted(pool(1)[0], "vf-0", DOWN),), pool(1), Change.LINK),
        (pool(1), (tainted(pool(1)[0], "vf-0", {**DOWN, "key": "nodefabric.io/Quarantined"}),), Change.FAULT),
        (pool(1), (tainted(pool_slice(0, 1, ["vf-0", "vf-1"]), "vf-0", DOWN),), Change.STRUCTURE),
    ],
)
def test_a_fault_is_told_from_another_structure(before: Any, after: Any, kind: Change) -> None:
    assert change(before, after) is kind


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
