"""Events at the Node object: devices that became unhealthy or healthy, a configuration that was refused.

`kubectl describe node` shows them. Nothing in the agent waits for this: what is to be said is worked out by
comparing one offer with the next, waits in a short list, and is sent at a bounded rate when the API server answers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from agent.errors import Refused, Unavailable
from agent.model.printable import one_line
from agent.model.reasons import text_of
from agent.model.unit import OfferedUnit
from agent.reload import WAITS
from agent.topology.blocking import on_own_thread

PATH = "/api/v1/namespaces/default/events"
"""Events about objects of no namespace are kept in this one (pkg/registry/core/event, k8s.io/client-go record)."""
MOST_WAITING = 50
MOST_MESSAGE = 1024
"""The API server refuses longer messages."""
MOST_NAMED = 3

log = logging.getLogger(__name__)

Units = Mapping[str, Sequence[OfferedUnit]]


class EventApi(Protocol):
    """The API server, as this needs it."""

    def create(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object in a collection. Blocks; raises Unavailable."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Times in seconds."""

    look: float = 0.5
    """Between looks for something new."""
    refill: float = 30.0
    """After so long one more event may be sent."""
    burst: int = 10
    """So many may be sent at once, after a quiet time."""
    retry: float = 30.0
    """Between attempts while the API server does not answer."""


@dataclass(frozen=True, slots=True)
class Saying:
    """What is to be said. Equal ones are counted."""

    reason: str
    message: str
    warning: bool


DEFAULT_PACE = Pace()


def changes(before: Units, after: Units) -> Iterator[Saying]:
    """Say what became of units between two offers: one sentence for each resource and reason."""
    for resource, units in after.items():
        former = {unit.unit_id: unit.health for unit in before.get(resource, ())}
        worse: dict[str, list[str]] = {}
        better: dict[str, list[str]] = {}
        for unit in units:
            was = former.get(unit.unit_id)
            if not unit.health.healthy:
                if was is None or was != unit.health:
                    worse.setdefault(str(unit.health.reason), []).append(unit.device or unit.unit_id)
            elif was is not None and not was.healthy:
                better.setdefault(str(was.reason), []).append(unit.device or unit.unit_id)
        for reason, devices in worse.items():
            text = f"{_count(resource, devices)} unhealthy: {text_of(reason) or reason}: {_named(devices)}"
            yield Saying(reason, text[:MOST_MESSAGE], True)
        for reason, devices in better.items():
            text = f"{_count(resource, devices)} healthy again, after {reason}: {_named(devices)}"
            yield Saying("DeviceHealthy", text[:MOST_MESSAGE], False)


def of_config(problem: str | None) -> Saying:
    """Say what became of a new configuration, given what is wrong with it."""
    if problem is None:
        return Saying("ConfigTaken", "the configuration is in effect", False)
    return Saying("ConfigWaits" if problem.startswith(WAITS) else "ConfigRefused", problem[:MOST_MESSAGE], True)


class NodeEvents:
    """Tells the API server. `run` until cancelled."""

    def __init__(
        self,
        api: EventApi,
        node_name: str,
        units: Callable[[], Units],
        config_problem: Callable[[], str | None],
        *,
        pace: Pace = DEFAULT_PACE,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`units` gives the offer of this moment, the same object until there is another."""
        self._api = api
        self._node_name = node_name
        self._units = units
        self._config_problem = config_problem
        self._pace = pace
        self._clock = clock
        self._wall_clock = wall_clock
        self._waiting: OrderedDict[Saying, tuple[int, float, float]] = OrderedDict()
        """What is to be said → how often it happened, first and last time (since the epoch)."""
        self._tokens = float(pace.burst)
        self._refilled = clock()
        self._not_before = clock()
        self._dropped = 0

    async def run(self) -> None:
        """Look, and say what is new."""
        seen: Units = {}
        problem: str | None = None
        while True:
            units = self._units()
            if units is not seen:
                for saying in changes(seen, units):
                    self.note(saying)
                seen = units
            now = self._config_problem()
            if now != problem:
                self.note(of_config(now))
                problem = now
            await self._send()
            await asyncio.sleep(self._pace.look)

    def note(self, saying: Saying) -> None:
        """Put something on the list. The oldest give way when it is full."""
        now = self._wall_clock()
        count, first, _ = self._waiting.get(saying, (0, now, now))
        self._waiting[saying] = count + 1, first, now
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popitem(last=False)
            self._dropped += 1

    async def _send(self) -> None:
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._refilled) / self._pace.refill, float(self._pace.burst))
        self._refilled = now
        while self._waiting and self._tokens >= 1 and self._clock() >= self._not_before:
            saying, (count, first, last) = next(iter(self._waiting.items()))
            document = self._document(saying, count, first, last)
            try:
                await on_own_thread(partial(self._api.create, PATH, document))
            except Refused as error:
                log.warning("the API server does not take events, %r is lost: %s", saying.message, error)
            except Unavailable as error:
                log.info("events wait for the API server: %s", error)
                self._not_before = self._clock() + (error.retry_after or self._pace.retry)
                return
            self._tokens -= 1
            del self._waiting[saying]
            if self._dropped:
                log.warning("%d events were too many, and never sent", self._dropped)
                self._dropped = 0

    def _document(self, saying: Saying, count: int, first: float, last: float) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{self._node_name}.{secrets.token_hex(8)}", "namespace": "default"},
            # kubelet gives the node's name for its UID, and `kubectl describe node` looks for that.
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Node",
                "name": self._node_name,
                "uid": self._node_name,
            },
            "type": "Warning" if saying.warning else "Normal",
            "reason": saying.reason,
            "message": one_line(saying.message)[:MOST_MESSAGE],
            "count": count,
            "firstTimestamp": _rfc3339(first),
            "lastTimestamp": _rfc3339(last),
            "source": {"component": "nodefabric", "host": self._node_name},
            "reportingComponent": "nodefabric",
            "reportingInstance": self._node_name,
        }


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _count(resource: str, devices: Sequence[str]) -> str:
    return f"{len(devices)} units of {resource} are" if len(devices) > 1 else f"1 unit of {resource} is"


def _named(devices: Sequence[str]) -> str:
    named = list(dict.fromkeys(devices))
    more = len(named) - MOST_NAMED
    return ", ".join(named[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
