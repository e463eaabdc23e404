"""Objects of one kind, as the API server has them: one list, then one watch that is taken up again.

A watch runs on a thread of its own, because the client blocks. What is kept of
an object is what `Watched.read` makes of it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agent.cluster.apiserver import POD, ApiServer, ObjectKind
from agent.errors import AgentError, Refused, Unavailable
from agent.model.printable import is_memory, parse_exact
from agent.process.backoff import Backoff

SHORTEST_WATCH_SECONDS = 300
LONGEST_WATCH_SECONDS = 600
"""The server is asked to end a watch at a random moment between these, so that a cluster's watches do not all end at
once; the same as client-go's reflectors do."""
RETRY = Backoff(first=1.0, longest=300.0, jitter=0.5)
SHORT_SECONDS = 5.0
REST = Backoff(first=1.0, longest=60.0, jitter=1.0)
"""A watch that ends within so short a time is begun again after such a rest: a server, or what stands before it, that
ends each at once must not be asked without end."""
GONE = 410
T = TypeVar("T")
_Key = tuple[str, str, str]
"""Namespace, name, UID: a new object may have the name of one that is gone."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Watched(Generic[T]):
    """Which objects are followed, and what is kept of them."""

    kind: ObjectKind
    fields: Mapping[str, str]
    """Field path → value that it has in all of them."""
    read: Callable[[dict[str, Any]], T]
    words: str
    """What they are, for people."""
    retry: Backoff = RETRY


class ObjectWatch(Generic[T]):
    """Follows objects. `objects`, `state` and `problem` may be read from any thread."""

    def __init__(self, api: ApiServer, watched: Watched[T], changed: Callable[[], None]) -> None:
        """`changed` is called, on the watch's thread, when an object came, went, or is another in what is kept of it.

        Also when a problem begins.
        """
        self._api = api
        self._watched = watched
        self._changed = changed
        self.chance = random.SystemRandom().random  # the module's own generator is every thread's
        self._stopped = threading.Event()
        self.pause: Callable[[float], object] = self._stopped.wait
        self.clock = time.monotonic
        self._short = 0
        """How many watches in a row have ended at once."""
        self._found: dict[_Key, T] = {}
        self._version: str | None = None
        self._failures = 0
        self.state: tuple[tuple[T, ...], int] | None = None
        """The objects, and the resource version that they are of: what was written later is not in them yet."""
        self.problem: str | None = None
        """Why the objects may be out of date, or have never been listed; None while all is well."""

    @property
    def objects(self) -> tuple[T, ...] | None:
        """By namespace and name; None before the first list."""
        state = self.state
        return None if state is None else state[0]

    def start(self) -> None:
        """Follow on a daemon thread: one that waits for a server which says nothing must not hold up the end."""
        threading.Thread(target=self.follow, name=f"watch {self._watched.kind.plural}", daemon=True).start()

    def stop(self) -> None:
        """Report nothing from now on. The thread ends with the server's next word: it sends a bookmark every minute."""
        self._stopped.set()

    def follow(self) -> None:
        """List and watch until stopped."""
        while not self._stopped.is_set():
            began = self.clock()
            try:
                if self._version is None:
                    self._list()
                    continue
                self._watch(self._version)
            except AgentError as error:
                if isinstance(error, Refused) and error.status == GONE:
                    log.debug("the watch of %s is too far behind; listing again", self._watched.words)
                    self._version = None
                    self._rest(self.clock() - began)
                else:
                    self._failed(error)
            except Exception as error:  # the thread must live on: nobody else would ever look again
                log.exception("the API server's answer about %s is not understood", self._watched.words)
                self._version = None
                self._failed(Unavailable(f"the answer is not understood: {type(error).__name__}: {error}"))
            else:
                self._rest(self.clock() - began)

    def _rest(self, lasted: float) -> None:
        self._short = self._short + 1 if lasted < SHORT_SECONDS else 0
        self.pause(REST.after(max(1, self._short), chance=self.chance()))

    def _list(self) -> None:
        version, found = self._api.list_of(self._watched.kind, self._watched.fields, self._keyed)
        self._found = dict(found)
        self._version = version
        self._well()
        self._publish()

    def _watch(self, since: str) -> None:
        spread = LONGEST_WATCH_SECONDS - SHORTEST_WATCH_SECONDS
        seconds = SHORTEST_WATCH_SECONDS + int(spread * self.chance())
        for event in self._api.watch(self._watched.kind, self._watched.fields, since, seconds):
            if self._stopped.is_set():
                return
            self._well()
            if self._take(event):
                self._publish()
        self._well()

    def _take(self, event: Mapping[str, Any]) -> bool:
        """Note an event. Returns whether anything that is kept has changed."""
        item = event["object"]
        self._version = item["metadata"]["resourceVersion"]
        if event["type"] == "BOOKMARK":
            return False
        key, value = self._keyed(item)
        if event["type"] == "DELETED":
            return self._found.pop(key, None) is not None
        before = self._found.get(key)
        self._found[key] = value
        return before != value

    def _keyed(self, item: dict[str, Any]) -> tuple[_Key, T]:
        metadata = item["metadata"]
        return (metadata.get("namespace", ""), metadata["name"], metadata["uid"]), self._watched.read(item)

    def _publish(self) -> None:
        if self._stopped.is_set():
            return  # another has a watch of its own by now
        self.state = tuple(self._found[key] for key in sorted(self._found)), int(self._version or 0)
        self._changed()

    def _well(self) -> None:
        if self._failures:
            log.info("%s are watched again", self._watched.words, extra={"failures": self._failures})
        self._failures = 0
        self.problem = None

    def _failed(self, error: AgentError) -> None:
        if self._stopped.is_set():
            return
        self._failures += 1
        text = f"{self._watched.words} cannot be watched: {error}"
        if text != self.problem:
            log.warning("%s", text, extra={"reason": error.reason})
        self.problem = text
        self._changed()
        asked = error.retry_after if isinstance(error, Unavailable) else None
        self.pause(self._watched.retry.after(self._failures, asked, self.chance()))


@dataclass(frozen=True, slots=True)
class WatchedPod:
    """What schedulers' rules need to know of one pod."""

    namespace: str
    name: str
    uid: str
    phase: str
    """Pending, Running, Succeeded, Failed or Unknown."""
    exclusive_native: bool = False
    """Guaranteed, with whole CPUs, memory or huge pages in a container that lasts."""
    extended: frozenset[str] = frozenset()
    """Extended resources that its lasting containers ask for."""
    exclusive_init: bool = False
    """Whether an init container that ends asks for extended resources, or, if Guaranteed, for exclusive native ones."""


def pods_of(node_name: str) -> Watched[WatchedPod]:
    """Follow the pods of a node."""
    return Watched(POD, {"spec.nodeName": node_name}, read_pod, "the pods of the node")


def read_pod(item: Mapping[str, Any]) -> WatchedPod:
    """Take from a Pod object what is kept of it."""
    metadata, status = item["metadata"], item.get("status", {})
    lasting, ending = _requests(item.get("spec", {}))
    guaranteed = status.get("qosClass") == "Guaranteed"
    return WatchedPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        phase=status.get("phase", "Pending"),
        exclusive_native=guaranteed and any(_is_exclusive(name, amount) for name, amount in lasting),
        extended=frozenset(name for name, _ in lasting if not _is_native(name)),
        exclusive_init=any(
            not _is_native(name) or (guaranteed and _is_exclusive(name, amount)) for name, amount in ending
        ),
    )


def _requests(spec: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return what the containers ask for that run as long as the pod, sidecars too; and what the others ask for."""
    init = spec.get("initContainers") or ()
    sidecars = [container for container in init if container.get("restartPolicy") == "Always"]
    ending = [container for container in init if container.get("restartPolicy") != "Always"]
    return _asked([*(spec.get("containers") or ()), *sidecars]), _asked(ending)


def _asked(containers: Iterable[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    return [item for each in containers for item in (each.get("resources", {}).get("requests") or {}).items()]


def _is_native(name: str) -> bool:
    """Whether Kubernetes defines a resource itself (core/v1/helper, IsNativeResource)."""
    return "/" not in name or "kubernetes.io/" in name


def _is_exclusive(name: str, quantity: Any) -> bool:
    amount = parse_exact(quantity)
    if name == "cpu":
        return amount > 0 and amount == amount.to_integral_value()
    return amount > 0 and is_memory(name)
