"""What the stand-in for the API server knows: objects, who owns their fields, pods and their history, faults.

Source of what it does to metadata, and of its refusals: Kubernetes 1.36, staging/src/k8s.io/apiserver/pkg/registry
(generic and rest); of pods, pkg/apis/core.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from hack.sim.cluster import definitions
from hack.sim.cluster.definitions import Definition
from hack.sim.cluster.dra import Invalid, admitted
from hack.sim.cluster.dra.gates import DEFAULT
from hack.sim.cluster.dra.rights import Caller, refused
from hack.sim.cluster.field_sets import Conflicts, Managed, apply, rendered, update
from hack.sim.cluster.history import History
from hack.sim.cluster.kinds import NODE, POD, Kind, Kinds, Target, is_selected


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
    deletes: int = 0
    """Objects that were deleted, one by one or as a collection."""
    replaced: int = 0
    created: int = 0
    conflicts: int = 0
    failures: int = 0
    applied_bytes: int = 0
    """Of accepted applies: request line, headers and body."""


class Stored:
    """One object."""

    def __init__(self, kind: Kind, key: str) -> None:
        self.envelope = {"apiVersion": kind.api_version, "kind": kind.kind}
        namespace, _, name = key.rpartition("/") if kind.namespaced else ("", "", key)
        self.names = {"name": name} | ({"namespace": namespace} if namespace else {})
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
            **self.names,
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
        self.history = History()
        self._lock = self.history.guard
        self.definitions = {d.kind: d for d in (definitions.load() if known is None else known)}
        self.kinds = Kinds(self.definitions.values())
        self._objects: dict[tuple[str, str], Stored] = {}
        self._pods: dict[tuple[str, str], dict[str, Any]] = {}
        self.created: list[dict[str, Any]] = []
        """Events (the Kubernetes objects) that were posted, oldest first."""
        self._counts: dict[str, int] = dict.fromkeys(asdict(Counts()), 0)
        self._fault = Fault(times=0)
        self.gates = DEFAULT
        """Feature gates that are on."""
        self.separators = (",", ":")
        """How the client wrote the parameters that are stored."""
        self.caller: Caller | None = None
        """Who calls by HTTP; None: somebody who may write every part of a status."""
        self.before: Callable[[], object] = int
        """Called, on the connection's thread, before each request is done."""
        self.now = _now
        """Tells the time that objects are written at."""

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

    def get(self, kind: str, key: str) -> dict[str, Any] | None:
        """Return a copy of an object. `key` is its name; of a namespaced kind, `namespace/name`."""
        with self._lock:
            self._counts["reads"] += 1
            found = self._objects.get((kind, key))
            return None if found is None else found.document()

    def delete(self, kind: str, key: str, preconditions: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """Remove an object: status, and the object as it was or why not."""
        with self._lock:
            found = self._objects.get((kind, key))
            if found is None:
                return 404, f"{kind} {key} not found"
            for name, value in (preconditions or {}).items():
                stored = {"uid": found.uid, "resourceVersion": str(found.version)}[name]
                if stored != value:
                    return 409, f"Precondition failed: {name} in precondition: {value}, in object meta: {stored}"
            del self._objects[kind, key]
            self._counts["deletes"] += 1
            self.history.happen("DELETED", kind, found.document())
            return 200, found.document()

    def delete_collection(self, target: Target, fields: Mapping[str, str]) -> int:
        """Remove all objects whose fields are these, as kubelet does at its start. Tells how many there were."""
        with self._lock:
            keys = [key for key, document in self._of(target) if is_selected(document, fields)]
            for key in keys:
                self.delete(target.kind.kind, key)
            return len(keys)

    def apply(
        self, kind: str, key: str, document: dict[str, Any], manager: str, force: bool, of_status: bool = False
    ) -> tuple[int, Any]:
        """Apply a document: status, and the object, the Conflicts, or why not."""
        with self._lock:
            found, known = self._objects.get((kind, key)), self.kinds.named(kind)
            if of_status and found is None:
                return 404, f'{known.plural} "{key}" not found'
            given = document.get("metadata", {}).get("uid")
            if found is not None and given not in (None, found.uid):
                text = f'metadata.uid: Invalid value: "{given}": field is immutable'
                return 422, f'{known.group} "{key}" is invalid: {text}'
            part = _part(known, document, of_status)
            try:
                managed = apply(found.managed if found else None, part, manager, force=force)
                if of_status and (problems := self._refused("patch", managed.content, found)):
                    return 422, f'{known.group} "{key}" is invalid: {"; ".join(problems)}'
                stored, has_changed = self._admit(known, key, managed, (manager, "Apply"))
            except Conflicts as conflicts:
                self._counts["conflicts"] += 1
                return 409, conflicts
            except Invalid as invalid:
                return 422, str(invalid)
            self._counts["applies"] += 1
            self._counts["changes"] += has_changed
            return (201 if found is None else 200), stored

    def changed_parameters(self, target: Target, body: str | None) -> str | None:
        """Say why a write of this status is refused, since it would change bytes of the allocation's parameters.

        `body` is that of a PUT, None for a patch of any kind. The server keeps parameters as the bytes that it was sent
        (apimachinery's RawExtension), and encodes them again for a patch, compact and with sorted keys: observed on
        Kubernetes 1.36.2 with keys that are not sorted, as 422 for server-side apply, merge and JSON patch, while a PUT
        of the whole object was accepted. That blanks count as well follows from apimachinery's code.
        """
        with self._lock:
            found = self._objects.get((target.kind.kind, target.key))
            status = found.managed.content.get("status", {}) if found is not None and target.of_status else {}
        for config in (status.get("allocation") or {}).get("devices", {}).get("config") or ():
            parameters = config.get("opaque", {}).get("parameters")
            stored = json.dumps(parameters, separators=self.separators)
            if stored not in (body or json.dumps(parameters, separators=(",", ":"), sort_keys=True)):
                value = json.dumps(status["allocation"])
                text = f"status.allocation: Invalid value: {value}: field is immutable"
                return f'{target.kind.group} "{target.name}" is invalid: {text}'
        return None

    def merge(self, kind: str, key: str, patch: Mapping[str, Any], manager: str) -> tuple[int, Any]:
        """Apply a merge patch: status, and the object or why not. With a resource version it is for that one alone."""
        with self._lock:
            found = self._objects.get((kind, key))
            if found is None:
                return 404, f"{kind} {key} not found"
            metadata = dict(patch.get("metadata", {}))
            if metadata.pop("resourceVersion", str(found.version)) != str(found.version):
                self._counts["conflicts"] += 1
                return 409, f"Operation cannot be fulfilled on {key}: the object has been modified"
            content = merged(found.managed.content, {**patch, "metadata": metadata})
            self._counts["merges"] += 1
            managed = update(found.managed, content, manager)
            return 200, self._admit(self.kinds.named(kind), key, managed, (manager, "Update"))[0]

    def write(self, kind: str, key: str, document: Mapping[str, Any], manager: str) -> dict[str, Any]:
        """Replace an object's content, status and all, as a part of the cluster does. Raises Invalid."""
        with self._lock:
            found = self._objects.get((kind, key))
            content = {name: value for name, value in document.items() if name not in ("apiVersion", "kind")}
            managed = update(found.managed if found else None, content, manager)
            return self._admit(self.kinds.named(kind), key, managed, (manager, "Update"))[0]

    def create(self, target: Target, document: Mapping[str, Any], manager: str) -> tuple[int, Any]:
        """Create an object in a collection, perhaps with a generated name: status, and the object or why not."""
        metadata = document["metadata"]
        name = metadata.get("name") or f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
        return self._put(replace(target, name=name), document, manager, is_new=True)

    def replace(self, target: Target, document: Mapping[str, Any], manager: str) -> tuple[int, Any]:
        """Replace an object, or its status alone: status, and the object or why not."""
        return self._put(target, document, manager, is_new=False)

    def _put(self, target: Target, document: Mapping[str, Any], manager: str, *, is_new: bool) -> tuple[int, Any]:
        kind, key = target.kind, target.key
        with self._lock:
            found = self._objects.get((kind.kind, key))
            if (found is None) != is_new:
                return (
                    (409, f'{kind.plural} "{key}" already exists')
                    if is_new
                    else (404, f'{kind.plural} "{key}" not found')
                )
            before: Mapping[str, Any] = {} if found is None else found.managed.content
            version = document["metadata"].get("resourceVersion")
            if found is not None and version not in (None, str(found.version)):
                self._counts["conflicts"] += 1
                return 409, f"Operation cannot be fulfilled on {key}: the object has been modified"
            part = _part(kind, document, target.of_status)
            kept = {name: value for name, value in before.items() if (name == "status") != target.of_status}
            content = {**(kept if kind.has_status else {}), **part}
            if target.of_status and (problems := self._refused("update", content, found)):
                return 422, f'{kind.group} "{key}" is invalid: {"; ".join(problems)}'
            try:
                stored = self.write(kind.kind, key, content, manager)
            except Invalid as invalid:
                return 422, str(invalid)
            self._counts["created" if is_new else "replaced"] += 1
            return (201 if is_new else 200), stored

    def listed(
        self, target: Target, fields: Mapping[str, str], limit: int = 0, following: str = ""
    ) -> tuple[int, list[dict[str, Any]], str]:
        """Return the resource version, the objects, and where more of them follow, if any.

        `following` is what an earlier page ended with. Raises LookupError if that page is forgotten.
        """
        with self._lock:
            self._counts["lists"] += 1
            version, _, last = following.partition("/") if following else (str(self.history.version), "", "")
            if int(version) < self.history.compacted:
                raise LookupError(following)
            left = [
                (key, document) for key, document in self._of(target) if key > last and is_selected(document, fields)
            ]
            page = left[: limit or None]
            more = f"{version}/{page[-1][0]}" if len(page) < len(left) else ""
            return int(version), [document for _, document in page], more

    def _of(self, target: Target) -> list[tuple[str, dict[str, Any]]]:
        """List the objects of a collection by their keys."""
        if target.kind is POD:
            found = [("/".join(key), pod) for key, pod in self._pods.items()]
        else:
            found = [(key, one.document()) for (kind, key), one in self._objects.items() if kind == target.kind.kind]
        within = f"{target.namespace}/" if target.namespace else ""
        return sorted((key, document) for key, document in found if key.startswith(within))

    def _refused(self, verb: str, content: Mapping[str, Any], found: Stored | None) -> list[str]:
        if self.caller is None or found is None:
            return []
        before = found.managed.content.get("status", {})
        return refused(self.caller, verb, content.get("status", {}), before, self.gates)

    def _admit(self, kind: Kind, key: str, managed: Managed, owner: tuple[str, str]) -> tuple[dict[str, Any], bool]:
        """Store an object by the rules of its kind. Tells whether that changed it. Raises Invalid."""
        found = self._objects.get((kind.kind, key))
        old = None if found is None else found.managed.content
        content = admitted(kind, key.rpartition("/")[2], managed.content, old, self.gates, self.now())
        managed = Managed(content, managed.owners)
        stored = found or Stored(kind, key)
        has_changed = found is None or stored.managed != managed
        if has_changed:
            self._objects[kind.kind, key] = stored
            self.history.version += 1
            stored.managed, stored.version = managed, self.history.version
            stored.written[owner] = self.now()
            self.history.happen("ADDED" if found is None else "MODIFIED", kind.kind, stored.document(), stored.version)
        return stored.document(), has_changed

    # --------------------------------------------------------------------- pods

    def put_pod(self, node: str, namespace: str, name: str, phase: str = "Running", **more: Any) -> None:
        """Create a pod bound to a node, or change it. `more` may hold spec, qosClass and uid."""
        with self._lock:
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
            self.history.happen("ADDED" if old is None else "MODIFIED", POD.kind, pod)

    def delete_pod(self, namespace: str, name: str) -> None:
        """Remove a pod."""
        with self._lock:
            self.history.happen("DELETED", POD.kind, self._pods.pop((namespace, name)))

    def compact(self) -> None:
        """Forget what has happened so far, as etcd does every few minutes."""
        self.history.compact()

    def break_watches(self) -> None:
        """Cut the connections of all watches."""
        self.history.break_watches()


def _part(kind: Kind, document: Mapping[str, Any], of_status: bool) -> dict[str, Any]:
    """Return what of a document is written by this path."""
    if of_status:
        return {"status": document.get("status", {})}
    found = dict(document)
    if kind.has_status:
        found.pop("status", None)
    return found


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
