"""Events at the Node object: devices that became unhealthy or healthy, a configuration that was refused.

`kubectl describe node` shows them. Nothing in the agent waits for this: what became of units between two offers, or of
a configuration, waits in a short list, and is sent at a bounded rate when the API server answers.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agent.cluster.apiserver import ApiServer, on_own_thread
from agent.cluster.keeper import Keeper
from agent.config.files import WAITS
from agent.errors import AgentError, Refused
from agent.model.health import text_of
from agent.model.printable import one_line, some
from agent.offer.offer import HealthChange, Offer, Units, health_changes
from agent.process.backoff import Backoff
from agent.process.conditions import Conditions
from agent.state import Latest

PATH = "/api/v1/namespaces/default/events"
"""Events about objects of no namespace are kept in this one (pkg/registry/core/event, k8s.io/client-go record)."""
MOST_WAITING = 50
MOST_MESSAGE = 1024
"""The API server refuses longer messages."""
MOST_NAMED = 3
RETRY = Backoff(first=1.0, longest=30.0, jitter=0.1)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Times:
    """Times in seconds."""

    look: float = 0.5
    """Between looks for something new."""
    refill: float = 30.0
    """After so long one more event may be sent."""
    burst: int = 10
    """So many may be sent at once, after a quiet time."""
    retry: Backoff = RETRY


@dataclass(frozen=True, slots=True)
class Saying:
    """What is to be said. Equal ones are counted."""

    reason: str
    message: str
    warning: bool


DEFAULT_TIMES = Times()


def of_health(change: HealthChange) -> Saying:
    """Say what became of units."""
    named, reason = _named(change.devices), change.reason
    if change.is_healthy:
        text = f"{_count(change.resource, change.devices)} healthy again, after {reason}: {named}"
        return Saying("DeviceHealthy", text[:MOST_MESSAGE], False)
    text = f"{_count(change.resource, change.devices)} unhealthy: {text_of(reason) or reason}: {named}"
    return Saying(reason, text[:MOST_MESSAGE], True)


def of_config(problem: str | None) -> Saying:
    """Say what became of a new configuration, given what is wrong with it."""
    if problem is None:
        return Saying("ConfigTaken", "the configuration is in effect", False)
    return Saying("ConfigWaits" if problem.startswith(WAITS) else "ConfigRefused", problem[:MOST_MESSAGE], True)


def of_renumbering(what: str | None) -> Saying:
    """Say which pods kubelet would give another's device, or that it would no more."""
    if what is None:
        return Saying("RenumberedEnded", "no pod would be given another's device any more", False)
    return Saying("Renumbered", what[:MOST_MESSAGE], True)


OF_CONDITIONS = {"config": of_config, "renumbered": of_renumbering}
"""Condition → what is said of it."""


class NodeEvents(Keeper):
    """Sends them."""

    def __init__(
        self,
        api: ApiServer,
        node_name: str,
        offer: Latest[Offer],
        conditions: Conditions,
        times: Times = DEFAULT_TIMES,
    ) -> None:
        super().__init__(times.retry)
        self.look_seconds = times.look
        self._api = api
        self._node_name = node_name
        self._offer = offer
        self._conditions = conditions
        self._times = times
        self._waiting: dict[Saying, tuple[int, float, float]] = {}
        """What is to be said → how often it happened, first and last time (since the epoch)."""
        self._tokens = float(times.burst)
        self._refilled: float | None = None
        self._units: Units = {}
        self._said: dict[str, str | None] = dict.fromkeys(OF_CONDITIONS)

    async def _notice(self, now: float, *, is_changed: bool) -> None:
        units = self._offer.value.offered
        if units is not self._units:
            for change in health_changes(self._units, units):
                self.note(of_health(change))
            self._units = units
        for name, saying in OF_CONDITIONS.items():
            found = self._conditions.found.get(name)
            if found != self._said[name]:
                self.note(saying(found))
                self._said[name] = found

    def note(self, saying: Saying) -> None:
        """Put something on the list. The oldest give way when it is full."""
        now = time.time()
        count, first, _ = self._waiting.get(saying, (0, now, now))
        self._waiting[saying] = count + 1, first, now
        if len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]

    async def _work(self, now: float) -> float:
        passed = now - (self._refilled if self._refilled is not None else now)
        self._tokens = min(self._tokens + passed / self._times.refill, float(self._times.burst))
        self._refilled = now
        while self._waiting and self._tokens >= 1:
            saying, (count, first, last) = next(iter(self._waiting.items()))
            document = self._document(saying, count, first, last)
            try:
                await on_own_thread(self._api.create, PATH, document)
            except Refused as error:
                log.warning("the API server does not take events, %r is lost: %s", saying.message, error)
            self._went_well()
            self._tokens -= 1
            del self._waiting[saying]
        return math.inf

    def _failed(self, error: AgentError, pause: float) -> float:
        log.info("events wait for the API server: %s", error)
        return pause

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
    return some(list(dict.fromkeys(devices)), MOST_NAMED)
