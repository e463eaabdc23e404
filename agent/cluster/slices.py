"""Keep the node's ResourceSlices at the API server as they should be, and write nothing while they are.

The slices come from a cell. They are followed by a watch, since others take them away: kubelet deletes all of its
node at its start, and those of a driver that has been away for 30 s. At the agent's end they stay.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any

from agent.cluster import slice_plan
from agent.cluster.apiserver import NODE, SLICE, ApiServer, on_own_thread
from agent.cluster.keeper import Keeper
from agent.cluster.object_watch import RETRY as RELIST
from agent.cluster.object_watch import ObjectWatch, Watched
from agent.cluster.slice_plan import Batch, Change, Document, Plan, StoredSlice, Wanted
from agent.errors import AgentError, Refused, Unavailable
from agent.model.fields import at
from agent.model.printable import parse_exact
from agent.process.backoff import Backoff
from agent.report.report import Report
from agent.state import Latest, first

PUBLISHING, FEATURES = "slices", "dra-features"
"""Conditions: what keeps slices from being written; what the cluster drops of them."""
RETRY = Backoff(first=1.0, longest=30.0, jitter=0.1)
_NO_VALUE = "exactly one value must be specified"
"""What the server says of an attribute of which nothing is left (`validateDeviceAttribute`)."""
_FOLLOWS: Mapping[str, str] = {
    slice_plan.DROPPED_TAINTS: "taints are dropped (DRADeviceTaints): unhealthy devices that nobody has are left out",
    slice_plan.DROPPED_CAPACITY: "shared capacity is dropped (DRAConsumableCapacity): resources with shares or late"
    " binding offer nothing; set dra.shares: devices, or enable the gate",
    slice_plan.DROPPED_LISTS: "lists are refused (DRAListTypeAttributes): of several nearest GPUs the first alone is"
    " published; set dra.listAttributes: false, or enable the gate",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pool:
    """Whose slices."""

    driver: str
    node_name: str

    @property
    def fields(self) -> Mapping[str, str]:
        """What selects them."""
        return {"spec.driver": self.driver, "spec.nodeName": self.node_name}


@dataclass(frozen=True, slots=True)
class SliceCells:
    """The slices that there should be (None as long as that is not known), and what the cluster drops of them."""

    slices: Latest[tuple[Document, ...] | None]
    dropped: Latest[frozenset[str]]
    """Set here. Words of `slice_plan`; stays until the agent starts again."""
    published: Latest[int | None] = field(default_factory=partial(Latest[int | None], None))
    """Set here. How many of them the server has as they should be; None as long as nobody knows."""


@dataclass(frozen=True, slots=True)
class SliceTimes:
    """When to write. All in seconds."""

    fault: float = 0.5
    structure: float = 2.0
    link_jitter: float = 3.0
    """Faults of links are spread by as much: a leaf switch takes thousands of nodes with it."""
    heal: float = 0.5
    """After others changed or removed a slice: kubelet removes them one by one."""
    released: float = 10.0
    """So long the Node may say that a device plugin offers a resource which is now ours alone to offer."""
    look: float = 1.0
    """How often it is looked at meanwhile."""
    retry: Backoff = RETRY


DEFAULT_TIMES = SliceTimes()


class SlicePublisher(Keeper):
    """Keeps the slices of one pool."""

    def __init__(
        self,
        api: ApiServer,
        pool: Pool,
        cells: SliceCells,
        report: Report,
        times: SliceTimes = DEFAULT_TIMES,
    ) -> None:
        super().__init__(times.retry)
        self._api = api
        self._pool = pool
        self._cells = cells
        cells.slices.subscribe(self.changed)
        self._report = report
        self._conditions = report.conditions
        self._metrics = report.metrics
        self._waits = times
        self._watch = self._new_watch()
        self._documents: tuple[Document, ...] | None = None
        """Those that `_wanted` is of."""
        self._wanted: tuple[Wanted, ...] = ()
        self._answers: dict[str, StoredSlice] = {}
        """What writes were answered with, as long as the watch has not come so far."""
        self._deleted: frozenset[str] = frozenset()
        """UIDs of slices that the watch may still have."""
        self._same: dict[str, str] = {}
        self._batch = Batch()
        self._settled: tuple[Document, ...] | None = None
        """Those that were all at the server once: if they are not any more, others did that."""
        self._times: dict[slice_plan.Taint, str] = {}
        self._owner = ""
        self._offered: frozenset[str] = frozenset()
        """Resources that were published before: no plugin offers them."""
        self._released_by: float | None = None
        self._due: float | None = None

    def _new_watch(self) -> ObjectWatch[StoredSlice]:
        words, retry = "the node's ResourceSlices", self._waits.retry
        watched = Watched(SLICE, self._pool.fields, slice_plan.stored_of, words, replace(RELIST, longest=retry.longest))
        return ObjectWatch(self._api, watched, self.changed)

    async def run(self) -> None:
        """Publish until cancelled; it may be begun again. What keeps it from writing is waited out, and said."""
        self._watch = self._new_watch()
        self._watch.start()
        try:
            await super().run()
        finally:
            self._watch.stop()
            self._cells.published.set(None)
            self._conditions.set(PUBLISHING, None)
            self._conditions.set(FEATURES, None)

    async def _work(self, now: float) -> float:
        stored = self._stored()
        if stored is None or self._documents is None:
            return math.inf
        if not self._owner:
            self._owner = await self._node_uid()
        plan = self._plan(stored)
        self._cells.published.set(len(self._wanted) - len(plan.writes))
        if plan.is_nothing:
            self._settled = self._documents
            self._batch = Batch(plan.generation, slice_plan.contents_of(self._wanted))
            self._due = None
            self._all_well()
            return math.inf
        if self._due is None:
            self._due = now + self._waits.heal
        if now < self._due:
            return self._due
        if not await self._is_released(now, stored):
            return now + self._waits.look
        heals = self._settled is self._documents
        await self._carry_out(stored)
        if heals and self._cells.slices.value is self._documents:
            self._settled = None
            self._report.reconciled("slices-rewritten", "changed-by-others")
        self._due = None
        self._all_well()
        return now  # others may have written meanwhile

    async def _notice(self, now: float, *, is_changed: bool) -> None:
        """Take the newest slices, and decide when they are to be written at the latest."""
        if self._watch.problem is not None and not self._failures:
            self._conditions.set(PUBLISHING, self._watch.problem)
        documents = self._cells.slices.value
        if documents is None or documents is self._documents:
            return
        before = self._documents
        self._wanted = await asyncio.to_thread(slice_plan.wanted_of, documents)  # a megabyte, on a large node
        self._documents = documents
        contents = {one.content for one in self._wanted}
        self._same = {sent: stored for sent, stored in self._same.items() if sent in contents}
        if before is None or not documents:
            self._due = now
            return
        times, kind = self._waits, slice_plan.change(before, documents)
        if kind is Change.NOTHING:
            return
        wait = times.structure if kind is Change.STRUCTURE else times.fault
        if kind is Change.LINK:
            wait += times.link_jitter * self.chance()
        self._due = min(self._due or now + wait, now + wait)

    def _stored(self) -> dict[str, StoredSlice] | None:
        """Return what the server has, by name: as the watch knows it, and by answers that it has not come to yet."""
        state = self._watch.state
        if state is None:
            return None
        slices, version = state
        self._answers = {name: one for name, one in self._answers.items() if one.version > version}
        self._deleted &= {one.uid for one in slices}
        found = {one.name: one for one in slices if one.uid not in self._deleted} | self._answers
        for one in found.values():
            self._times.update(one.times)
        wanted = slice_plan.taints_of(self._documents or ())
        self._times = {taint: at for taint, at in self._times.items() if taint in wanted}
        return found

    def _plan(self, stored: Mapping[str, StoredSlice]) -> Plan:
        return slice_plan.plan(self._wanted, stored, self._owner, self._batch, self._same)

    # ------------------------------------------------------------------ writing

    async def _node_uid(self) -> str:
        """Ask for the Node's UID. It may be a new object by now, and the old one's slices are collected."""
        metadata = await on_own_thread(self._api.metadata, NODE, self._pool.node_name)
        return str(metadata["uid"])

    async def _is_released(self, now: float, stored: Mapping[str, StoredSlice]) -> bool:
        """Whether no plugin offers any more what is now published for the first time; after a while True in any case.

        The scheduler serves a pod that asks for the resource from slices exactly if the Node has none of it.
        """
        offered = self._offered.union(*(one.resources for one in stored.values()))
        news = slice_plan.resources_of(self._documents or ()) - offered
        if news:
            node = await on_own_thread(self._api.get, NODE, self._pool.node_name) or {}
            amounts = at(node, "status.allocatable", dict, {})
            held = sorted(name for name in news if _is_some(amounts.get(name)))
            if held:
                self._released_by = self._released_by or now + self._waits.released
                if now < self._released_by:
                    return False
                log.warning(
                    "the Node still has %s by a device plugin: pods that ask for it get it there", ", ".join(held)
                )
        self._released_by = None
        return True

    async def _carry_out(self, stored: Mapping[str, StoredSlice]) -> None:
        self._owner = await self._node_uid()
        plan = self._plan(stored)
        if plan.writes:
            self._batch = Batch(plan.generation, slice_plan.contents_of(self._wanted))
        documents = self._documents
        for one in plan.writes:
            await self._write(one, plan.generation)
            if self._cells.slices.value is not documents:
                return  # what was written made others of them: the rest of these is not worth it
        self._offered |= slice_plan.resources_of(documents or ())
        for gone in plan.deletes:
            await on_own_thread(self._api.delete, SLICE, gone.name, gone.uid)
            self._deleted |= {gone.uid}
            self._answers.pop(gone.name, None)
        if plan.writes or plan.deletes:
            log.info(
                "the node's ResourceSlices are published",
                extra={"written": len(plan.writes), "deleted": len(plan.deletes), "generation": plan.generation},
            )

    async def _write(self, one: Wanted, generation: int) -> None:
        node = {"name": self._pool.node_name, "uid": self._owner}
        sent = slice_plan.document_of(one, generation, node, self._times)
        try:
            stored, dropped = await on_own_thread(self._apply, sent)
        except Unavailable as error:
            self._metrics.api_write(SLICE.kind, error.reason)
            if _is_of_lists(error) and slice_plan.has_lists(sent):
                documents = self._cells.slices.value
                await self._drops(frozenset({slice_plan.DROPPED_LISTS}))
                if self._cells.slices.value is not documents:
                    return
            raise
        self._metrics.api_write(SLICE.kind, "accepted")
        self._answers[one.name] = stored
        self._same[one.content] = stored.content
        self._times.update(stored.times)
        await self._drops(dropped)

    def _apply(self, sent: Document) -> tuple[StoredSlice, frozenset[str]]:
        """Apply a slice; how it stands then, and what of it was dropped. On a thread: the answer may be large."""
        answer = self._api.apply(SLICE, sent, force=True)
        return slice_plan.stored_of(answer), slice_plan.dropped_in(sent, answer)

    async def _drops(self, words: frozenset[str]) -> None:
        """Note what the cluster drops. Other slices come of it, and are written as soon as they are there."""
        if words <= self._cells.dropped.value:
            return
        dropped = self._cells.dropped.value | words
        follows = "; ".join(_FOLLOWS[word] for word in sorted(dropped))
        text = f"features are off in this cluster, as far as was seen since the agent's start: {follows}"
        self._conditions.set(FEATURES, text)
        documents = self._cells.slices.value
        self._cells.dropped.set(dropped)
        await first(self._cells.slices.other_than(documents), seconds=self._waits.structure)
        self._documents = None  # the next ones are not waited with

    # ------------------------------------------------------------------ outcome

    def _failed(self, error: AgentError, pause: float) -> float:
        self._conditions.set(PUBLISHING, f"the node's devices cannot be published: {error}")
        return pause

    def _all_well(self) -> None:
        if failures := self._went_well():
            log.info("the node's ResourceSlices are published again", extra={"failures": failures})
        if self._watch.problem is None:
            self._conditions.set(PUBLISHING, None)


def _is_some(amount: Any) -> bool:
    try:
        return amount is not None and parse_exact(amount) > 0
    except ValueError:
        return False


def _is_of_lists(error: Unavailable) -> bool:
    is_invalid = isinstance(error, Refused) and error.status == HTTPStatus.UNPROCESSABLE_ENTITY
    return is_invalid and ".attributes[" in str(error) and _NO_VALUE in str(error)


def remove_all(api: ApiServer, pool: Pool) -> int:
    """Delete all slices of a pool, and return how many there were. Blocks. Raises Unavailable."""
    _, found = api.list_of(SLICE, pool.fields, slice_plan.stored_of)
    return sum(api.delete(SLICE, one.name, one.uid) for one in found)
