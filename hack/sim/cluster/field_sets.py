"""Server-side apply as the API server does it: who owns which fields, and what an apply changes. Pure.

A field is a path of keys down to a value that is replaced as a whole: a scalar, or a list (custom objects have atomic
lists, unless their definition says otherwise). The lists of KEYED are kept item by item, by their keys; an item is one
field. An empty mapping is no field. Source: Kubernetes 1.36, staging/src/k8s.io/apimachinery/pkg/util/managedfields,
with sigs.k8s.io/structured-merge-diff.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Path = tuple[str, ...]
Owner = tuple[str, str]
"""Manager and operation: Apply or Update."""
KEYED: Mapping[Path, tuple[str, ...]] = {
    ("metadata", "ownerReferences"): ("uid",),
    ("status", "devices"): ("driver", "pool", "device", "shareID"),
}
OF_SERVER = frozenset(
    {"name", "namespace", "uid", "creationTimestamp", "resourceVersion", "managedFields", "generation"}
)


@dataclass(frozen=True, slots=True)
class Conflict:
    field: Path
    manager: str
    operation: str

    def cause(self, api_version: str) -> dict[str, str]:
        """Return the cause as a Status of the API server lists it."""
        how = f" using {api_version}" if self.operation == "Apply" else " with update"
        return {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{self.manager}"{how}',
            "field": "".join(f".{part}" for part in self.field),
        }


class Conflicts(Exception):
    """Other managers own fields with other values."""

    def __init__(self, found: Iterable[Conflict]) -> None:
        self.found = tuple(found)
        super().__init__(f"{len(self.found)} conflicts")


@dataclass(frozen=True, slots=True)
class Managed:
    """An object's content, without what the server adds, and the fields that each manager owns."""

    content: Mapping[str, Any]
    owners: Mapping[Owner, frozenset[Path]]


def copied(document: Any) -> Any:
    """Copy what is JSON; many times faster than a copy of anything."""
    return json.loads(json.dumps(document))


def apply(present: Managed | None, document: Mapping[str, Any], manager: str, *, force: bool) -> Managed:
    """Apply a document. Raises Conflicts; with `force` the fields are taken from the others instead."""
    present = present or Managed({}, {})
    me = (manager, "Apply")
    wanted = fields(document)
    found = [
        Conflict(path, owner[0], owner[1])
        for owner, paths in sorted(present.owners.items())
        if owner != me
        for path in sorted(paths & wanted.keys())
        if _at(present.content, path) != wanted[path]
    ]
    if found and not force:
        raise Conflicts(found)
    taken = {conflict.field for conflict in found}
    owners = {owner: paths - taken for owner, paths in present.owners.items() if owner != me}
    others = frozenset[Path]().union(*owners.values())
    content = copied(dict(present.content))
    for path in present.owners.get(me, frozenset()) - wanted.keys() - others:
        _remove(content, path)
    for path, value in wanted.items():
        _put(content, path, value)
    owners[me] = frozenset(wanted)
    return Managed(content, {owner: paths for owner, paths in owners.items() if paths})


def update(present: Managed | None, document: Mapping[str, Any], manager: str) -> Managed:
    """Replace the object's content, as PUT does: the manager then owns what is not as it was."""
    before = fields(present.content) if present is not None else {}
    after = fields(document)
    changed = frozenset(path for path, value in after.items() if before.get(path) != value)
    old = present.owners if present is not None else {}
    owners = {owner: (paths & after.keys()) - changed for owner, paths in old.items()}
    me = (manager, "Update")
    owners[me] = owners.get(me, frozenset()) | changed
    content = copied(dict(document))
    content["metadata"] = {key: value for key, value in content.get("metadata", {}).items() if key not in OF_SERVER}
    return Managed(content, {owner: paths for owner, paths in owners.items() if paths})


def fields(document: Mapping[str, Any]) -> dict[Path, Any]:
    """List the fields of a document with their values."""
    found: dict[Path, Any] = {}

    def walk(value: Any, path: Path) -> None:
        if path in KEYED and isinstance(value, list):
            found.update({(*path, _key(path, item)): item for item in value})
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                if not (path == ("metadata",) and key in OF_SERVER):
                    walk(inner, (*path, key))
        elif path:
            found[path] = value

    walk({key: value for key, value in document.items() if key not in ("apiVersion", "kind")}, ())
    return found


def rendered(paths: Iterable[Path]) -> dict[str, Any]:
    """Write fields as managedFields holds them (fieldsV1)."""
    tree: dict[str, Any] = {}
    for path in sorted(paths):
        inner = tree
        for part in path:
            inner = inner.setdefault(part if part.startswith("k:") else f"f:{part}", {})
    return tree


def _at(content: Mapping[str, Any], path: Path) -> Any:
    return fields(content).get(path)


def _key(path: Path, item: Mapping[str, Any]) -> str:
    return "k:" + "/".join(str(item.get(key, "")) for key in KEYED[path])


def _put(content: dict[str, Any], path: Path, value: Any) -> None:
    for part in path[:-1]:
        if path[:2] in KEYED and part == path[1]:
            items = content.setdefault(part, [])
            at = next((n for n, one in enumerate(items) if _key(path[:2], one) == path[2]), len(items))
            items[at : at + 1] = [copied(value)]
            return
        content = content.setdefault(part, {})
    content[path[-1]] = copied(value)


def _remove(content: dict[str, Any], path: Path) -> None:
    if path[:2] in KEYED:
        items = content[path[0]][path[1]]
        items[:] = [one for one in items if _key(path[:2], one) != path[2]]
        return
    for part in path[:-1]:
        content = content.get(part, {})
    content.pop(path[-1], None)
