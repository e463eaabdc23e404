"""This node's own Node object: its UID, and the labels and annotations that this agent has applied to it.

Only its metadata is read, and seldom: when something is to be published, and again when that is older than a
heartbeat, for a node that was taken out of the cluster and came back has another UID.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agent.clients.apiserver import FIELD_MANAGER, NODE, ObjectKind
from agent.errors import Unavailable
from agent.topology.blocking import on_own_thread
from agent.topology.content import owned_keys

RETRY_SECONDS = 30.0

log = logging.getLogger(__name__)


class MetadataApi(Protocol):
    """The API server, as far as this needs it."""

    def metadata(self, kind: ObjectKind, name: str) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class NodeMetadata:
    uid: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """Those that this agent has applied."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Likewise."""


class OwnNode:
    """Reads the Node object when asked, at most once in `max_age` seconds."""

    def __init__(
        self, api: MetadataApi, name: str, max_age: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._name = name
        self._max_age = max_age
        self._clock = clock
        self._found: NodeMetadata | None = None
        self._due: float | None = None
        self._reading = asyncio.Lock()
        self.problem = "the Node object has not been read yet"
        """Why it could not be read when it was last tried; empty if it could."""

    async def read(self) -> NodeMetadata | None:
        """Return what is known of the Node; None while the API server has not told anything yet."""
        async with self._reading:  # who asks meanwhile has the same answer
            now = self._clock()
            if self._due is None or now >= self._due:
                self._due = now + RETRY_SECONDS
                try:
                    self._found = _parse(await on_own_thread(lambda: self._api.metadata(NODE, self._name)))
                    self._due = now + self._max_age
                    self.problem = ""
                except Unavailable as error:
                    self.problem = str(error)
                    log.debug("the Node object could not be read: %s", error)
            return self._found


def _parse(metadata: Mapping[str, Any]) -> NodeMetadata:
    uid = metadata.get("uid")
    mine = {}
    for section in ("labels", "annotations"):
        values = metadata.get(section)
        keys = owned_keys(metadata, section, FIELD_MANAGER)
        mine[section] = {k: str(v) for k, v in values.items() if k in keys} if isinstance(values, dict) else {}
    return NodeMetadata(uid if isinstance(uid, str) and uid else None, mine["labels"], mine["annotations"])
