"""Publish the node's NodeResourceTopology object when, and only when, it says something new.

A change is waited out (`coalesce`), the object is built and compared with what the API server
accepted last; equal content is not written. A slow heartbeat writes it anyway, in case someone
removed or changed it. A failing API server is asked again with growing pauses, the cap being
minutes; nothing else in the agent waits for it. The first write is spread over `start_spread`
seconds, so that a cluster that powers on does not write all its nodes in one second.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from agent.errors import AgentError, Unavailable
from agent.metrics import Metrics
from agent.topology.resource import KIND, canonical

log = logging.getLogger(__name__)
T = TypeVar("T")

Build = Callable[[str | None], Awaitable[Mapping[str, Any] | None]]
"""Node UID (None if it could not be learnt) → the object, or None if there is nothing to say."""


class TopologyApi(Protocol):
    """The API server, as the publisher needs it. Methods block and raise Unavailable."""

    def node_uid(self, name: str) -> str:
        """Return the UID of a Node object."""

    def apply_topology(self, document: Mapping[str, Any]) -> None:
        """Apply the NodeResourceTopology object on the server's side."""


@dataclass(frozen=True, slots=True)
class Pace:
    """When to write. All in seconds."""

    coalesce: float = 2.0
    heartbeat: float = 600.0
    """The object is written anew this long after the last write."""
    refresh: float = 10.0
    """The object is built and compared this often even if nothing called `changed`: nobody tells when
    kubelet takes units back, and pods without devices of ours count for the fingerprint too."""
    start_spread: float = 30.0
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
        node_name: str,
        build: Build,
        api: TopologyApi,
        metrics: Metrics,
        pace: Pace,
        chance: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_name = node_name
        self._build = build
        self._api = api
        self._metrics = metrics
        self._pace = pace
        self._chance = chance
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nudge = asyncio.Event()
        self._node_uid: str | None = None
        self._accepted: bytes | None = None
        self._beat_at = 0.0
        self._failures = 0
        self.last_error: str | None = None
        """What is wrong with publishing now, for the status page; None if nothing."""

    def changed(self) -> None:
        """Say that the inventory, the ledger or kubelet's pods may have changed."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._nudge.set)

    async def run(self) -> None:
        """Publish until cancelled. Errors of ours are waited out; others end the task."""
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(self._pace.start_spread * self._chance())
            self._nudge.set()
            while True:
                await self._wait()
                self._nudge.clear()
                try:
                    await self._publish()
                except AgentError as error:
                    await self._failed(error)
                else:
                    self._recovered()
        finally:
            self._loop = None

    async def _wait(self) -> None:
        """Wait for a change and let it settle, or for the next refresh or heartbeat."""
        left = self._pace.refresh
        if self._accepted is not None:
            left = max(0.0, min(left, self._beat_at - self._clock()))
        try:
            await asyncio.wait_for(self._nudge.wait(), left)
        except TimeoutError:
            return
        if self._accepted is not None:
            await asyncio.sleep(self._pace.coalesce)

    async def _publish(self) -> None:
        if self._node_uid is None:
            self._node_uid = await self._learn_node_uid()
        document = await self._build(self._node_uid)
        if document is None:
            return
        content = canonical(document)
        if content == self._accepted and self._clock() < self._beat_at:
            return
        try:
            await on_own_thread(lambda: self._api.apply_topology(document))
        except Unavailable as error:
            self._metrics.api_write(KIND, error.reason)
            raise
        self._metrics.api_write(KIND, "accepted")
        self._accepted = content
        self._beat_at = self._clock() + self._pace.varied(self._pace.heartbeat, self._chance())

    async def _learn_node_uid(self) -> str | None:
        """Ask for the Node's UID. Without it the object has no owner, which is no reason to publish nothing."""
        try:
            return await on_own_thread(lambda: self._api.node_uid(self._node_name))
        except Unavailable as error:
            log.debug("the Node object could not be read; the topology has no owner: %s", error)
            return None

    async def _failed(self, error: AgentError) -> None:
        self._failures += 1
        if self.last_error != str(error):
            log.warning("the topology cannot be published: %s", error, extra={"reason": error.reason})
        self.last_error = str(error)
        asked = error.retry_after if isinstance(error, Unavailable) else None
        await asyncio.sleep(self._pace.varied(self._pace.retry(self._failures, asked), self._chance()))
        self._nudge.set()

    def _recovered(self) -> None:
        if self._failures:
            log.info("the topology is published again", extra={"failures": self._failures})
        self._failures = 0
        self.last_error = None


async def on_own_thread(work: Callable[[], T]) -> T:
    """Run blocking work on a daemon thread of its own.

    Not on the loop's executor: the interpreter joins that one's threads at exit, so an API server
    that does not answer would hold up the end of the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]  # None only where T allows it

    def run() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = work()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, value, failure)
        except RuntimeError:
            log.debug("the loop ended before the API server answered")

    threading.Thread(target=run, name="api", daemon=True).start()
    return await done
