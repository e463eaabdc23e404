"""What objects of the API server say, compared. Pure."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

_OF_SERVER = frozenset({"apiVersion", "kind", "metadata", "status"})


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return one text for one content, to tell whether anything changed."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def holds(stored: Any, wanted: Any) -> bool:
    """Tell whether a stored object has all that was applied. It may have more, as the server and others add to it."""
    if isinstance(wanted, Mapping):
        return isinstance(stored, Mapping) and all(k in stored and holds(stored[k], v) for k, v in wanted.items())
    if isinstance(wanted, list) and wanted and all(isinstance(item, Mapping) and "uid" in item for item in wanted):
        # Owner references: a list that the server keeps by UID, and others may add to.
        return isinstance(stored, list) and all(any(holds(one, item) for one in stored) for item in wanted)
    return bool(stored == wanted)


def same(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Tell whether a stored object says what is wanted and nothing besides; its metadata may hold more."""
    wanted_keys, stored_keys = (set(document) - {"metadata"} for document in (wanted, stored))
    return (
        wanted_keys == stored_keys
        and all(stored[key] == wanted[key] for key in wanted_keys)
        and holds(stored.get("metadata", {}), wanted.get("metadata", {}))
    )


def managed(metadata: Mapping[str, Any], manager: str, *, applied: bool = True) -> list[Mapping[str, Any]]:
    """List the field sets (fieldsV1) that a manager owns, by server-side apply or in any way."""
    entries = metadata.get("managedFields")
    return [
        entry["fieldsV1"]
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict)
        and entry.get("manager") == manager
        and (not applied or entry.get("operation") == "Apply")
        and isinstance(entry.get("fieldsV1"), dict)
    ]


def owned_keys(metadata: Mapping[str, Any], section: str, manager: str) -> frozenset[str]:
    """List the keys of `labels` or `annotations` that a manager has applied."""
    found: set[str] = set()
    for fields in managed(metadata, manager):
        keys = fields.get("f:metadata", {}).get(f"f:{section}", {})
        found |= {str(key).removeprefix("f:") for key in keys if str(key).startswith("f:")}
    return frozenset(found)


def other_writers(stored: Mapping[str, Any], manager: str) -> list[str]:
    """List who else owns anything of an object besides its metadata."""
    entries = stored.get("metadata", {}).get("managedFields")
    found = set()
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("manager") != manager and isinstance(entry.get("fieldsV1"), dict):
            fields = {str(key).removeprefix("f:") for key in entry["fieldsV1"]}
            if fields - _OF_SERVER:
                found.add(str(entry.get("manager")))
    return sorted(found)


def without(document: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Leave out labels and annotations by their field path: `.metadata.labels.example.com/rack`."""
    left = copy.deepcopy(dict(document))
    for field in fields:
        for section in ("labels", "annotations"):
            prefix = f".metadata.{section}."
            if field.startswith(prefix):
                left.get("metadata", {}).get(section, {}).pop(field.removeprefix(prefix), None)
    return left
