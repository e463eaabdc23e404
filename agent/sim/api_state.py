"""What the stand-in for the API server knows: objects, who owns their fields, pods and their history, faults."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from agent.clients.apiserver import NODE
from agent.sim import definitions
from agent.sim.definitions import Definition
from agent.sim.field_sets import Conflicts, Managed, apply, rendered, update

DAEMON_SETS = "/apis/apps/v1/namespaces/nodefabric/daemonsets"
"""The collection of those of the agent's own namespace."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What to do wrong with the next `times` requests (-1: with all) whose path begins like this."""

    status: int = 0
    """Answer with this status instead of doing the work."""
    retry_after: int | None = None
    delay_seconds: float = 0.0
    drop: bool = False
    """Close the connection without an answer."""
    times: int = -1
    path: str = "/"


@dataclass(frozen=True, slots=True)
class Counts:
    reads: int = 0
    """Single objects."""
    lists: int = 0
    watches: int = 0
    """Begun ones."""
    applies: int = 0
    """Accepted ones."""
    changes: int = 0
    """Applies that changed the content."""
    merges: int = 0
    """Accepted merge patches."""
    created: int = 0
    conflicts: int = 0
    failures: int = 0
    applied_bytes: int = 0
    """Of accepted applies: request line, headers and body."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a pod."""

    version: int
    type: str
    pod: Mapping[str, Any]


class Stored:
    """One object."""

    def __init__(self, kind: str, api_version: str, name: str) -> None:
        self.envelope = {"apiVersion": api_version, "kind": kind}
        self.name = name
        self.uid = str(uuid.uuid4())
        self.created = _now()
        self.managed = Managed({}, {})
        self.version = 0
        self.written: dict[tuple[str, str], str] = {}
        """Owner → when it last changed something."""

    def document(self) -> dict[str, Any]:
        """Return the object as the server tells it. A copy."""
        content: dict[str, Any] = json.loads(json.dumps(self.managed.content))
        metadata = {
            **content.pop("metadata", {}),
            "name": self.name,
            "uid": self.uid,
            "creationTimestamp": self.created,
            "resourceVersion": str(self.version),
            "managedFields": [
                {
                    "manager": owner[0],
                    "operation": owner[1],
                    "apiVersion": self.envelope["apiVersion"],
                    "time": self.written.get(owner, self.created),
                    "fieldsType": "FieldsV1",
                    "fieldsV1": rendered(paths),
                }
                for owner, paths in sorted(self.managed.owners.items())
            ],
        }
        return {**self.envelope, "metadata": metadata, **content}


class ApiState:
    """The objects and the counts; safe to use from any thread."""

    def __init__(self, known: Iterable[Definition] | None = None) -> None:
        """`known` are the custom objects that the cluster has definitions for; by default all."""
        self._lock = threading.Lock()
        self._happened = threading.Condition(self._lock)
        self.definitions = {d.kind: d for d in (definitions.load() if known is None else known)}
        daemon_sets = {DAEMON_SETS: ("apps/v1", "DaemonSet")}
        self.collections = {NODE.path: (NODE.api_version, NODE.kind), **daemon_sets} | {
            f"/apis/{d.api_version}/{d.plural}": (d.api_version, d.kind) for d in self.definitions.values()
        }
        self._objects: dict[tuple[str, str], Stored] = {}
        self._pods: dict[tuple[str, str], dict[str, Any]] = {}
        self._events: list[Event] = []
        self.created: list[dict[str, Any]] = []
        """Events (the Kubernetes objects) that were posted, oldest first."""
        self._compacted = 0
        self._version = 1
        self._watches_to_break = 0
        self._counts: dict[str, int] = dict.fromkeys(asdict(Counts()), 0)
        self._fault = Fault(times=0)

    @property
    def counts(self) -> Counts:
        with self._lock:
            return Counts(**self._counts)

    def count(self, what: str, much: int = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._counts[what] += much

    def set_fault(self, fault: Fault | None) -> None:
        """Misbehave from now on, or no longer."""
        with self._lock:
            self._fault = fault or Fault(times=0)

    def take_fault(self, path: str) -> Fault | None:
        """Return what to do wrong with this request, and count it."""
        with self._lock:
            fault = self._fault
            if fault.times == 0 or not path.startswith(fault.path):
                return None
            if fault.times > 0:
                self._fault = Fault(**(asdict(fault) | {"times": fault.times - 1}))
            if fault.status or fault.drop:
                self._counts["failures"] += 1
            return fault

    # ------------------------------------------------------------------ objects

    def add_node(self, name: str, labels: Mapping[str, str] | None = None) -> str:
        """Create a Node object, as kubelet does, and return its UID."""
        metadata = {"labels": {"kubernetes.io/hostname": name, **(labels or {})}}
        node = {"metadata": metadata, "spec": {}, "status": {"nodeInfo": {"kubeletVersion": "v1.36.0"}}}
        return str(self.write(NODE.kind, name, node, "kubelet")["metadata"]["uid"])

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return a copy of an object."""
        with self._lock:
            self._counts["reads"] += 1
            found = self._objects.get((kind, name))
            return None if found is None else found.document()

    def delete(self, kind: str, name: str) -> None:
        """Remove an object, as an administrator would."""
        with self._lock:
            self._objects.pop((kind, name), None)

    def apply(self, kind: str, name: str, document: dict[str, Any], manager: str, force: bool) -> tuple[int, Any]:
        """Apply a document: status and object, or status and the Conflicts."""
        with self._lock:
            found = self._objects.get((kind, name))
            try:
                managed = apply(found.managed if found else None, document, manager, force=force)
            except Conflicts as conflicts:
                self._counts["conflicts"] += 1
                return 409, conflicts
            self._counts["applies"] += 1
            self._counts["changes"] += found is None or managed != found.managed
            return (201 if found is None else 200), self._store(kind, name, managed, (manager, "Apply"))

    def merge(self, kind: str, name: str, patch: Mapping[str, Any], manager: str) -> tuple[int, Any]:
        """Apply a merge patch: status, and the object or why not. With a resource version it is for that one alone."""
        with self._lock:
            found = self._objects.get((kind, name))
            if found is None:
                return 404, f"{kind} {name} not found"
            metadata = dict(patch.get("metadata", {}))
            if metadata.pop("resourceVersion", str(found.version)) != str(found.version):
                self._counts["conflicts"] += 1
                return 409, f"Operation cannot be fulfilled on {name}: the object has been modified"
            content = merged(found.managed.content, {**patch, "metadata": metadata})
            self._counts["merges"] += 1
            return 200, self._store(kind, name, update(found.managed, content, manager), (manager, "Update"))

    def write(self, kind: str, name: str, document: Mapping[str, Any], manager: str) -> dict[str, Any]:
        """Replace an object's content, as a PUT of another writer does."""
        with self._lock:
            found = self._objects.get((kind, name))
            content = {key: value for key, value in document.items() if key not in ("apiVersion", "kind")}
            managed = update(found.managed if found else None, content, manager)
            return self._store(kind, name, managed, (manager, "Update"))

    def _store(self, kind: str, name: str, managed: Managed, owner: tuple[str, str]) -> dict[str, Any]:
        stored = self._objects.get((kind, name))
        if stored is None:
            api_version = next(version for version, known in self.collections.values() if known == kind)
            stored = self._objects[kind, name] = Stored(kind, api_version, name)
        if stored.managed != managed or stored.version == 0:
            self._version += 1
            stored.managed, stored.version = managed, self._version
            stored.written[owner] = _now()
        return stored.document()

    # --------------------------------------------------------------------- pods

    def put_pod(self, node: str, namespace: str, name: str, phase: str = "Running", **more: Any) -> None:
        """Create a pod bound to a node, or change it. `more` may hold spec, qosClass and uid."""
        with self._happened:
            old = self._pods.get((namespace, name))
            given = {**more.pop("spec", {}), "nodeName": node}
            uid = more.pop("uid", None) or (old or {}).get("metadata", {}).get("uid") or str(uuid.uuid4())
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"namespace": namespace, "name": name, "uid": uid},
                "spec": given,
                "status": {"phase": phase, "qosClass": more.pop("qosClass", "BestEffort")},
            }
            self._pods[namespace, name] = pod
            self._happen("ADDED" if old is None else "MODIFIED", pod)

    def delete_pod(self, namespace: str, name: str) -> None:
        """Remove a pod."""
        with self._happened:
            self._happen("DELETED", self._pods.pop((namespace, name)))

    def compact(self) -> None:
        """Forget what has happened so far, as etcd does every few minutes."""
        with self._happened:
            self._events.clear()
            self._compacted = self._version

    def break_watches(self) -> None:
        """Cut the connections of all watches."""
        with self._happened:
            self._watches_to_break += 1
            self._happened.notify_all()

    def list_pods(self, node: str | None, limit: int = 0, following: str = "") -> tuple[int, list[dict[str, Any]], str]:
        """Return the resource version, the pods bound to a node (None: all), and where more of them follow, if any.

        `following` is what an earlier page ended with. Raises LookupError if that page is forgotten.
        """
        with self._lock:
            self._counts["lists"] += 1
            version, _, last = following.partition("/") if following else (str(self._version), "", "")
            if int(version) < self._compacted:
                raise LookupError(following)
            left = [
                (key, pod)
                for key, pod in sorted(("/".join(key), pod) for key, pod in self._pods.items())
                if key > last and node in (None, pod["spec"]["nodeName"])
            ]
            page = left[: limit or None]
            more = f"{version}/{page[-1][0]}" if len(page) < len(left) else ""
            return int(version), [pod for _, pod in page], more

    def watch(
        self, node: str | None, since: int, seconds: float, bookmark_seconds: float, send: Callable[[Any], None]
    ) -> str:
        """Send the events after a version until the time is over, the connection is cut, or the version is too old.

        Returns which of the three: over, cut or gone.
        """
        until = time.monotonic() + seconds
        with self._happened:
            self._counts["watches"] += 1
            breaks = self._watches_to_break
        while True:
            with self._happened:
                if since < self._compacted:
                    return "gone"
                news = [event for event in self._events if event.version > since]
                if not news:
                    left = until - time.monotonic()
                    if left <= 0:
                        return "over"
                    self._happened.wait(min(left, bookmark_seconds))
                if breaks != self._watches_to_break:
                    return "cut"
                news = [event for event in self._events if event.version > since]
                version = self._version
            for event in news:
                if node in (None, event.pod["spec"]["nodeName"]):
                    send({"type": event.type, "object": event.pod})
            if not news:
                bookmark = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(version)}}
                send({"type": "BOOKMARK", "object": bookmark})
            since = max([since, *(event.version for event in news)]) if news else version

    def _happen(self, kind: str, pod: dict[str, Any]) -> None:
        self._version += 1
        pod = json.loads(json.dumps(pod))
        pod["metadata"]["resourceVersion"] = str(self._version)
        self._events.append(Event(self._version, kind, pod))
        self._happened.notify_all()


def merged(content: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a merge patch (RFC 7386): null takes a key away, a list is replaced whole."""
    found = dict(content)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, Mapping):
            before = found.get(key)
            found[key] = merged(before if isinstance(before, Mapping) else {}, value)
        else:
            found[key] = value
    return found


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
