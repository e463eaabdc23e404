"""The pods bound to this node, as the API server has them: one list, then one watch that is taken up again.

Runs on a thread of its own, because the client blocks. What is kept of a pod is a few words.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from agent.errors import AgentError, Refused, Unavailable
from agent.model.quantity import parse_exact

SHORTEST_WATCH_SECONDS = 300
LONGEST_WATCH_SECONDS = 600
"""The server is told to end a watch at a random moment between these, so that a cluster's watches do not all end at
once; the same as client-go's reflectors do."""
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 300.0
SHORT_SECONDS = 5.0
LONGEST_REST_SECONDS = 60.0
"""A watch that ends within the first is begun again after a rest that doubles up to the second: a server, or what
stands before it, that ends each at once must not be asked without end."""
GONE = 410
T = TypeVar("T")

log = logging.getLogger(__name__)


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


class PodLister(Protocol):
    """The API server, as the watch needs it. Both block and raise Unavailable; Refused(410) asks for a new list."""

    def list_pods(self, node_name: str, read: Callable[[dict[str, Any]], T]) -> tuple[str, list[T]]: ...

    def watch_pods(self, node_name: str, since: str, seconds: int) -> Iterator[dict[str, Any]]: ...


class PodWatch:
    """Follows the pods of one node. `pods` and `problem` may be read from any thread."""

    def __init__(
        self,
        api: PodLister,
        node_name: str,
        changed: Callable[[], None],
        *,
        chance: Callable[[], float] | None = None,
        pause: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`changed` is called, on the watch's thread, when a pod came, went, or is another in what is kept of it."""
        self._api = api
        self._node_name = node_name
        self._changed = changed
        self._chance = chance or random.SystemRandom().random  # the module's own generator is every thread's
        self._stopped = threading.Event()
        self._pause = pause or self._stopped.wait
        self._clock = clock
        self._short = 0
        """How many watches in a row have ended at once."""
        self._pods: dict[str, WatchedPod] = {}
        self._version: str | None = None
        self._failures = 0
        self.pods: tuple[WatchedPod, ...] | None = None
        """By namespace and name; None before the first list."""
        self.problem: str | None = None
        """Why the pods may be out of date, or have never been listed; None while all is well."""

    def start(self) -> None:
        """Follow on a daemon thread: one that waits for a server which says nothing must not hold up the end."""
        threading.Thread(target=self.follow, name="pod watch", daemon=True).start()

    def stop(self) -> None:
        """Tell nothing from now on. The thread ends with the server's next word: it sends a bookmark every minute."""
        self._stopped.set()

    def follow(self) -> None:
        """List and watch until stopped."""
        while not self._stopped.is_set():
            began = self._clock()
            try:
                if self._version is None:
                    self._list()
                    continue
                self._watch(self._version)
            except AgentError as error:
                if isinstance(error, Refused) and error.status == GONE:
                    log.debug("the watch of pods is too far behind; listing anew")
                    self._version = None
                    self._rest(self._clock() - began)
                else:
                    self._failed(error)
            except Exception as error:  # the thread must live on: nobody else would ever look again
                log.exception("the API server's answer about pods is not understood")
                self._version = None
                self._failed(Unavailable(f"the answer is not understood: {type(error).__name__}: {error}"))
            else:
                self._rest(self._clock() - began)

    def _rest(self, lasted: float) -> None:
        self._short = self._short + 1 if lasted < SHORT_SECONDS else 0
        rest = min(LONGEST_REST_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(max(self._short - 1, 0), 30))
        self._pause(self._chance() * rest)

    def _list(self) -> None:
        self._version, found = self._api.list_pods(self._node_name, read_pod)
        self._pods = {pod.uid: pod for pod in found}
        self._well()
        self._tell()

    def _watch(self, since: str) -> None:
        spread = LONGEST_WATCH_SECONDS - SHORTEST_WATCH_SECONDS
        seconds = SHORTEST_WATCH_SECONDS + int(spread * self._chance())
        for event in self._api.watch_pods(self._node_name, since, seconds):
            if self._stopped.is_set():
                return
            self._well()
            if self._take(event):
                self._tell()
        self._well()

    def _take(self, event: Mapping[str, Any]) -> bool:
        """Note an event. Tells whether anything that is kept has changed."""
        item = event.get("object")
        if not isinstance(item, dict):
            return False
        version = item.get("metadata", {}).get("resourceVersion")
        if isinstance(version, str) and version:
            self._version = version
        if event.get("type") == "BOOKMARK":
            return False
        pod = read_pod(item)
        if event.get("type") == "DELETED":
            return self._pods.pop(pod.uid, None) is not None
        before = self._pods.get(pod.uid)
        self._pods[pod.uid] = pod
        return before != pod

    def _tell(self) -> None:
        if self._stopped.is_set():
            return  # another configuration has a watch of its own
        self.pods = tuple(sorted(self._pods.values(), key=lambda pod: (pod.namespace, pod.name, pod.uid)))
        self._changed()

    def _well(self) -> None:
        if self._failures:
            log.info("the pods of the node are watched again", extra={"failures": self._failures})
        self._failures = 0
        self.problem = None

    def _failed(self, error: AgentError) -> None:
        if self._stopped.is_set():
            return
        self._failures += 1
        text = f"the pods of the node cannot be watched: {error}"
        if text != self.problem:
            log.warning("%s", text, extra={"reason": error.reason})
        self.problem = text
        self._changed()
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures - 1, 30))
        if isinstance(error, Unavailable) and error.retry_after is not None:
            pause = max(pause, min(error.retry_after, LONGEST_PAUSE_SECONDS))
        self._pause(pause * (0.5 + self._chance() / 2))


def read_pod(item: Mapping[str, Any]) -> WatchedPod:
    """Take from a Pod object what is kept of it."""
    metadata, spec, status = (_section(item, key) for key in ("metadata", "spec", "status"))
    requests = [_section(_section(container, "resources"), "requests") for container in _lasting(spec)]
    guaranteed = status.get("qosClass") == "Guaranteed"
    return WatchedPod(
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        phase=str(status.get("phase", "Pending")),
        exclusive_native=guaranteed and any(_is_exclusive(k, v) for r in requests for k, v in r.items()),
        extended=frozenset(name for r in requests for name in r if not _is_native(name)),
    )


def _lasting(spec: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """List the containers that run as long as the pod: its own ones and its sidecars, which are init containers."""
    for container in spec.get("containers") or ():
        if isinstance(container, dict):
            yield container
    for container in spec.get("initContainers") or ():
        if isinstance(container, dict) and container.get("restartPolicy") == "Always":
            yield container


def _is_native(name: str) -> bool:
    """Tell whether Kubernetes defines a resource itself (core/v1/helper, IsNativeResource)."""
    return "/" not in name or "kubernetes.io/" in name


def _is_exclusive(name: str, quantity: Any) -> bool:
    try:
        amount = parse_exact(quantity)
    except ValueError:
        return False
    if name == "cpu":
        return amount > 0 and amount == amount.to_integral_value()
    return amount > 0 and (name == "memory" or name.startswith("hugepages-"))


def _section(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = document.get(key)
    return found if isinstance(found, dict) else {}
