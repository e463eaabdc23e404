"""Keep one object at the API server in step with the node, and say nothing when there is nothing new.

A change is waited out (`coalesce`), the object is built and compared with what the API server accepted last; equal
content is not written. Once per `heartbeat` the object is read and compared, in case someone removed or changed it,
and only then written. A failing API server is asked again with growing pauses; nothing else in the agent waits for
it. The first write is spread over `start_spread` seconds, so that a cluster that powers on does not write all its
nodes at once.

An object is applied without force first. If another writer owns fields of it, that is said (log, metric, condition),
and then the fields are taken over, or left to their owner, as the publication wants it.

The scheduler plugin NodeResourceTopologyMatch tries a pod that it refused again only when an object is written, and
takes an object over into its cache only some seconds after that write. So `settle` seconds after the last write comes
one more, which adds an annotation with the time of that last write. Every other write takes the annotation away: an
object without it has this write still to come, also for a new run of the agent.
"""

from __future__ import annotations

import copy
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agent.cluster.apiserver import FIELD_MANAGER, ApiServer, ObjectKind, on_own_thread
from agent.cluster.keeper import Keeper
from agent.errors import AgentError, Conflicted, Refused, Unavailable
from agent.process.backoff import Backoff
from agent.process.conditions import Conditions
from agent.report.metrics import Metrics

UNCHANGED_SINCE = "nodefabric.io/unchanged-since"
"""The annotation of an object that has settled."""
_OF_SERVER = frozenset({"apiVersion", "kind", "metadata", "status"})

RETRY = Backoff(first=1.0, longest=300.0, jitter=0.1)

log = logging.getLogger(__name__)

REFRESH_SECONDS = 10.0
"""An object is built and compared with what was accepted this often even if nothing called `changed`: nothing shows
when kubelet takes units back, and pods without devices of ours count for the fingerprint too."""
FACTS_SECONDS = 60.0
"""What labels are made of is looked at this often, even without a known change: a file, a GPU's fabric."""


class Publication(ABC):
    """One object at the API server that is made of this node: a module of its own, and a line in `publications.py`."""

    kind: ObjectKind
    is_shared = False
    """Whether it is the Node, of which this agent writes labels and an annotation, made of facts that change slowly.

    Fields that others own are left to them, and taken from them in objects that are ours. To build it, the API server
    is asked, which must be spared as this node's kubelet need not be.
    """
    settles = False
    """Whether its reader needs one more write after the last change."""

    @abstractmethod
    async def content(self) -> Mapping[str, Any] | None:
        """Build the object of this moment; None if there is nothing to say. May raise errors of ours."""

    def yields(self, error: AgentError) -> bool:
        """Whether the object is built differently after this error, so that a repeat may succeed."""
        return False


class Problems:
    """What is wrong with what is published, by subject. People see all of it as one condition."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._found: dict[str, str] = {}

    def note(self, subject: str, problem: str | None) -> None:
        """Note what is wrong with a subject, or that nothing is."""
        before = dict(self._found)
        if problem is None:
            self._found.pop(subject, None)
        else:
            self._found[subject] = problem
        if before != self._found:
            self._conditions.set("publishing", "; ".join(text for _, text in sorted(self._found.items())) or None)

    def forget(self) -> None:
        """Say no more that anything is wrong: nothing is published from now on."""
        self._found = {}
        self._conditions.set("publishing", None)


@dataclass(frozen=True, slots=True)
class Times:
    """When to look and write. All in seconds."""

    coalesce: float = 2.0
    heartbeat: float = 600.0
    """The object is read and compared this long after it was last found or made right."""
    refresh: float = REFRESH_SECONDS
    start_spread: float = 60.0
    settle: float = 0.0
    """One more write comes this long after the last; 0: none."""
    retry: Backoff = RETRY


class Publisher(Keeper):
    """Keeps one object in step with the node."""

    def __init__(
        self,
        publication: Publication,
        api: ApiServer,
        metrics: Metrics,
        times: Times,
        problems: Problems,
    ) -> None:
        super().__init__(times.retry)
        self._publication = publication
        self._kind = publication.kind
        self._api = api
        self._metrics = metrics
        self._times = times
        self._problems = problems
        self._accepted: bytes | None = None
        self._written: Mapping[str, Any] = {}
        """What was applied last: the document, perhaps without what others own."""
        self._is_unsure = False
        """A write was not answered: the server may have taken it nevertheless."""
        self._look_at: float | None = None
        """When the object is built next; None before the first step."""
        self._longest = times.retry.longest
        """The longest pause after an error of what is being done."""
        self._check_at = 0.0
        """When the server's object is read next."""
        self._settle_at: float | None = None
        """When the write is due that says that the object has settled; None if it has been written."""
        self._changed_at = ""
        self._dispute: str | None = None

    async def _notice(self, now: float, *, is_changed: bool) -> None:
        if self._look_at is None:
            self._look_at = now
            self._hold(now + self._times.start_spread * self.chance())
        elif is_changed:
            self._look_at = min(self._look_at, now + (self._times.coalesce if self._accepted is not None else 0.0))

    async def _work(self, now: float) -> float:
        if self._look_at is not None and now < self._look_at:
            return self._look_at
        self._look_at = now  # if it fails, what follows is the pause
        self._longest = self._times.retry.longest if self._publication.is_shared else self._times.refresh
        document = await self._publication.content()
        self._longest = self._times.retry.longest
        if document is not None:
            await self._publish(document, now)
        self._look_at = now + self._times.refresh
        if document is not None and self._accepted is not None:
            self._look_at = min(self._look_at, self._check_at, self._settle_at or self._check_at)
        if failures := self._went_well():
            log.info("%s is published again", self._kind.kind, extra={"failures": failures})
        self._problems.note(self._kind.kind, self._dispute)
        return self._look_at

    async def _publish(self, document: Mapping[str, Any], now: float) -> None:
        content = canonical(document)
        is_accepted = content == self._accepted and not self._is_unsure
        settles = content == self._accepted and self._settle_at is not None and now >= self._settle_at
        if not settles and is_accepted and (now < self._check_at or await self._is_there(now)):
            return
        left = await self._left(document) if self._accepted is None else None
        if left is not None:
            self._written = document
            settles = UNCHANGED_SINCE in left["metadata"].get("annotations", {})
        else:
            await self._apply(annotated(document, UNCHANGED_SINCE, self._changed_at) if settles else document)
        if settles or not self._times.settle:
            self._settle_at = None
        else:
            self._settle_at = now + self._times.settle
            self._changed_at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        self._accepted = content
        self._check_at = self._next_check(now)

    async def _left(self, document: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what an earlier run of the agent has left, if it is just this: a restart then writes nothing.

        Only of objects that are wholly ours. Of another's object the server alone knows which fields are ours.
        """
        if self._publication.is_shared:
            return None
        try:
            name = str(document["metadata"]["name"])
            stored = await on_own_thread(self._api.get, self._kind, name)
        except Refused:
            return None
        is_ours = stored is not None and same(stored, document) and not other_writers(stored, FIELD_MANAGER)
        return stored if is_ours else None

    async def _is_there(self, now: float) -> bool:
        """Whether the server still has the object as it was written. Logs who changed it."""
        if self._dispute and self._publication.is_shared:
            return False  # perhaps the others have given it up
        try:
            name = str(self._written["metadata"]["name"])
            stored = await on_own_thread(self._api.get, self._kind, name)
        except Refused:
            return False  # without the right to read, write it
        if stored is not None and holds(stored, self._written):
            self._check_at = self._next_check(now)
            self._dispute = None  # nobody has written it for a whole heartbeat
            return True
        others = other_writers(stored or {}, FIELD_MANAGER)
        what = f"was changed by {', '.join(others)}" if others else "was changed or removed"
        log.warning("the %s of this node %s; applying it again", self._kind.kind, what)
        return False

    async def _apply(self, document: Mapping[str, Any]) -> None:
        try:
            await self._write(document, force=False)
        except Conflicted as conflict:
            if not conflict.owners:
                raise
            self._dispute = self._disputed(conflict)
            if self._publication.is_shared:
                await self._write(without(document, [field for field, _ in conflict.owners]), force=False)
            else:
                await self._write(document, force=True)
        else:
            self._dispute = None

    async def _write(self, document: Mapping[str, Any], *, force: bool) -> None:
        try:
            await on_own_thread(self._api.apply, self._kind, document, force=force)
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
        if self._publication.is_shared:
            return f"{text}: these are left as they are; name other keys, or take them off the node"
        return f"{text}: let only one of them publish it"

    def _next_check(self, now: float) -> float:
        return now + self._times.heartbeat * (1 + self._times.retry.jitter * (2 * self.chance() - 1))

    def _failed(self, error: AgentError, pause: float) -> float:
        self._problems.note(self._kind.kind, f"{self._kind.kind} cannot be published: {error}")
        return min(pause, self._times.coalesce if self._publication.yields(error) else self._longest)


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return one text for one content, for comparison."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def annotated(document: Mapping[str, Any], key: str, text: str) -> dict[str, Any]:
    """Return the document with one more annotation."""
    metadata = document["metadata"]
    return {**document, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), key: text}}}


def holds(stored: Any, wanted: Any) -> bool:
    """Whether a stored object has all that was applied. It may have more, as the server and others add to it."""
    if isinstance(wanted, Mapping):
        return isinstance(stored, Mapping) and all(k in stored and holds(stored[k], v) for k, v in wanted.items())
    if isinstance(wanted, list) and wanted and all(isinstance(item, Mapping) and "uid" in item for item in wanted):
        # Owner references: a list that the server keeps by UID, and others may add to.
        return isinstance(stored, list) and all(any(holds(one, item) for one in stored) for item in wanted)
    return bool(stored == wanted)


def same(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a stored object says what is wanted and nothing besides; its metadata may hold more."""
    wanted_keys, stored_keys = (set(document) - {"metadata"} for document in (wanted, stored))
    return (
        wanted_keys == stored_keys
        and all(stored[key] == wanted[key] for key in wanted_keys)
        and holds(stored.get("metadata", {}), wanted.get("metadata", {}))
    )


def owned_keys(metadata: Mapping[str, Any], section: str, manager: str) -> frozenset[str]:
    """List the keys of `labels` or `annotations` that a manager has applied on the server's side."""
    found: set[str] = set()
    for entry in metadata.get("managedFields", ()):
        if entry["manager"] == manager and entry["operation"] == "Apply":
            keys = entry["fieldsV1"].get("f:metadata", {}).get(f"f:{section}", {})
            found |= {key.removeprefix("f:") for key in keys if key.startswith("f:")}
    return frozenset(found)


def other_writers(stored: Mapping[str, Any], manager: str) -> list[str]:
    """List who else owns anything of an object besides its metadata."""
    return sorted(
        {
            entry["manager"]
            for entry in stored.get("metadata", {}).get("managedFields", ())
            if entry["manager"] != manager and {key.removeprefix("f:") for key in entry["fieldsV1"]} - _OF_SERVER
        }
    )


def without(document: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Leave out labels and annotations by their field path: `.metadata.labels.example.com/rack`."""
    left = copy.deepcopy(dict(document))
    for field in fields:
        for section in ("labels", "annotations"):
            prefix = f".metadata.{section}."
            if field.startswith(prefix):
                left.get("metadata", {}).get(section, {}).pop(field.removeprefix(prefix), None)
    return left
