"""Keep one object at the API server in step with the node, and say nothing when there is nothing new.

A change is waited out (`coalesce`), the object is built and compared with what the API server accepted last; equal
content is not written. Once per `heartbeat` the object is read and compared, in case someone removed or changed it,
and only then written. A failing API server is asked again with growing pauses; nothing else in the agent waits for
it. The first write is spread over `start_spread` seconds, so that a cluster that powers on does not write all its
nodes at once.

An object is applied without force first. If another writer owns fields of it, that is said (log, metric, obstacle),
and then the fields are taken over, or left to their owner, as the publication wants it.

`step` is given the time and tells when it wants to be called again, so a day can pass in a second.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from agent.clients.apiserver import FIELD_MANAGER, ObjectKind
from agent.errors import AgentError, Conflicted, Refused, Unavailable
from agent.metrics import Metrics
from agent.topology.blocking import on_own_thread
from agent.topology.content import canonical, holds, other_writers, same, without

log = logging.getLogger(__name__)

Build = Callable[[], Awaitable[Mapping[str, Any] | None]]
"""The object of this moment, or None if there is nothing to say. May raise errors of ours."""


class ObjectApi(Protocol):
    """The API server, as the publisher needs it. Methods block and raise Unavailable."""

    def get(self, kind: ObjectKind, name: str) -> dict[str, Any] | None: ...

    def apply(self, kind: ObjectKind, document: Mapping[str, Any], *, force: bool) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Publication:
    """What is published."""

    kind: ObjectKind
    build: Build
    takes_over: bool = True
    """Whether fields that another writer owns are taken from it. If not, they are left out."""
    yields: Callable[[AgentError], bool] = lambda error: False
    """Told of an error; answers whether the object is built differently from now on, so that a repeat may succeed."""
    is_local: bool = True
    """Whether what it is built of is asked of this node alone, which need not be spared as the API server must."""


@dataclass(frozen=True, slots=True)
class Pace:
    """When to look and write. All in seconds."""

    coalesce: float = 2.0
    heartbeat: float = 600.0
    """The object is read and compared this long after it was last found or made right."""
    refresh: float = 10.0
    """The object is built and compared with what was accepted this often even if nothing called `changed`: nobody
    tells when kubelet takes units back, and pods without devices of ours count for the fingerprint too."""
    start_spread: float = 60.0
    retry_first: float = 1.0
    retry_cap: float = 300.0
    jitter: float = 0.1
    """Share of a pause by which it is varied, so that nodes do not move in step."""

    def retry(self, failures: int, asked: float | None) -> float:
        """Return the pause after so many failures in a row; the server may ask for a longer one."""
        pause = min(self.retry_cap, self.retry_first * 2.0 ** min(failures - 1, 30))
        return max(pause, min(asked or 0.0, self.retry_cap))

    def varied(self, pause: float, chance: float) -> float:
        """Vary a pause; `chance` is from 0 to 1."""
        return pause * (1 + self.jitter * (2 * chance - 1))


class Publisher:
    """Keeps one object in step with the node. Run `run` as a task; call `changed` from any thread."""

    def __init__(
        self,
        publication: Publication,
        api: ObjectApi,
        metrics: Metrics,
        pace: Pace,
        *,
        complain: Callable[[str | None], None] = lambda what: None,
        chance: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`complain` is told what is wrong with publishing, each time that this changes, and None when nothing is."""
        self._publication = publication
        self._kind = publication.kind
        self._api = api
        self._metrics = metrics
        self._pace = pace
        self._complain = complain
        self._chance = chance or random.SystemRandom().random  # the module's own generator is every thread's
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nudge = asyncio.Event()
        self._accepted: bytes | None = None
        self._written: Mapping[str, Any] = {}
        """What was applied last: the document, perhaps without what others own."""
        self._is_unsure = False
        """A write was not answered: the server may have taken it nevertheless."""
        self._looked = False
        self._look_at: float | None = None
        """When the object is built next; None before the first step."""
        self._check_at = 0.0
        """When the server's object is read next."""
        self._failures = 0
        self._dispute: str | None = None
        self._problem: str | None = None

    @property
    def kind(self) -> ObjectKind:
        """What is published."""
        return self._kind

    @property
    def problem(self) -> str | None:
        """What is wrong with publishing now; None if nothing."""
        return self._problem

    def changed(self) -> None:
        """Say that the node may have changed."""
        loop = self._loop
        if loop is None or loop.is_closed():
            self._nudge.set()  # `run` is not there to be woken, or the test calls `step` itself
        else:
            loop.call_soon_threadsafe(self._nudge.set)

    async def run(self) -> None:
        """Publish until cancelled. Errors of ours are waited out; others end the task."""
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                due = await self.step(self._clock())
                try:
                    async with asyncio.timeout(max(0.0, due - self._clock())):
                        await self._nudge.wait()
                except TimeoutError:
                    continue
        finally:
            self._loop = None

    async def step(self, now: float) -> float:
        """Do what is due at this moment, and return when something is due next, unless `changed` is called before."""
        if self._look_at is None:
            self._look_at = now + self._pace.start_spread * self._chance()
        elif self._nudge.is_set() and self._looked and not self._failures:
            self._look_at = min(self._look_at, now + (self._pace.coalesce if self._accepted is not None else 0.0))
        self._nudge.clear()
        if now < self._look_at:
            return self._look_at
        self._looked = True
        self._look_at = now + self._pace.refresh
        longest = self._pace.refresh if self._publication.is_local else self._pace.retry_cap
        document = None
        try:
            document = await self._publication.build()
            longest = self._pace.retry_cap
            if document is not None:
                await self._publish(document, now)
        except AgentError as error:
            self._failed(error, now, longest)
        else:
            self._went_well()
        if document is not None and self._accepted is not None and not self._failures:
            self._look_at = min(self._look_at, self._check_at)
        return self._look_at

    async def _publish(self, document: Mapping[str, Any], now: float) -> None:
        content = canonical(document)
        is_accepted = content == self._accepted and not self._is_unsure
        if is_accepted and (now < self._check_at or await self._is_there(now)):
            return
        if self._accepted is None and await self._was_left(document):
            self._written = document
        else:
            await self._apply(document)
        self._accepted = content
        self._check_at = self._next_check(now)

    async def _was_left(self, document: Mapping[str, Any]) -> bool:
        """Tell whether an earlier run of the agent has left exactly this: a fleet that restarts then writes nothing.

        Only of objects that are wholly ours. Of another's object the server alone knows which fields are ours.
        """
        if not self._publication.takes_over:
            return False
        try:
            name = str(document["metadata"]["name"])
            stored = await on_own_thread(lambda: self._api.get(self._kind, name))
        except Refused:
            return False
        return stored is not None and same(stored, document) and not other_writers(stored, FIELD_MANAGER)

    async def _is_there(self, now: float) -> bool:
        """Tell whether the server still has the object as it was written. Says who changed it, if somebody did."""
        if self._dispute and not self._publication.takes_over:
            return False  # perhaps the others have given it up
        try:
            name = str(self._written["metadata"]["name"])
            stored = await on_own_thread(lambda: self._api.get(self._kind, name))
        except Refused:
            return False  # without the right to read, writing tells
        if stored is not None and holds(stored, self._written):
            self._check_at = self._next_check(now)
            self._dispute = None  # nobody has written it for a whole heartbeat
            return True
        others = other_writers(stored or {}, FIELD_MANAGER)
        what = f"was changed by {', '.join(others)}" if others else "was changed or removed"
        log.warning("the %s of this node %s; applying it anew", self._kind.kind, what)
        return False

    async def _apply(self, document: Mapping[str, Any]) -> None:
        try:
            await self._write(document, force=False)
        except Conflicted as conflict:
            if not conflict.owners:
                raise
            self._dispute = self._disputed(conflict)
            if self._publication.takes_over:
                await self._write(document, force=True)
            else:
                await self._write(without(document, [field for field, _ in conflict.owners]), force=False)
        else:
            self._dispute = None

    async def _write(self, document: Mapping[str, Any], *, force: bool) -> None:
        try:
            await on_own_thread(lambda: self._api.apply(self._kind, document, force=force))
        except Unavailable as error:
            self._metrics.api_write(self._kind.kind, error.reason)
            self._is_unsure |= not isinstance(error, Refused)
            raise
        self._metrics.api_write(self._kind.kind, "accepted")
        self._written, self._is_unsure = document, False

    def _disputed(self, conflict: Conflicted) -> str:
        managers = ", ".join(sorted({manager for _, manager in conflict.owners}))
        fields = ", ".join(sorted({field for field, _ in conflict.owners}))
        text = f"{managers} writes {fields} of this node's {self._kind.kind} too"
        if self._publication.takes_over:
            return f"{text}: let only one of them publish it"
        return f"{text}: these are left as they are; name other keys, or take them off the node"

    def _next_check(self, now: float) -> float:
        return now + self._pace.varied(self._pace.heartbeat, self._chance())

    def _failed(self, error: AgentError, now: float, longest: float) -> None:
        self._failures += 1
        asked = error.retry_after if isinstance(error, Unavailable) else None
        pause = self._pace.varied(min(self._pace.retry(self._failures, asked), longest), self._chance())
        if self._publication.yields(error):
            pause = min(pause, self._pace.coalesce)
        self._look_at = now + pause
        self._say(f"{self._kind.kind} cannot be published: {error}")

    def _went_well(self) -> None:
        if self._failures:
            log.info("%s is published again", self._kind.kind, extra={"failures": self._failures})
        self._failures = 0
        self._say(self._dispute)

    def _say(self, problem: str | None) -> None:
        if problem != self._problem:
            self._problem = problem
            self._complain(problem)
