"""Definitions of custom objects, as data, and whether an object keeps to one.

A definition says what the API server checks of the CustomResourceDefinition that is published for the kind: types,
required fields, and that no other field is there. `quantity` is what a definition calls int-or-string with a pattern.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from agent.model.printable import parse_exact

_TYPES: Mapping[str, type | tuple[type, ...]] = {"object": dict, "array": list, "string": str, "integer": int}
_ENVELOPE = frozenset({"apiVersion", "kind", "metadata"})


@dataclass(frozen=True, slots=True)
class Definition:
    api_version: str
    kind: str
    plural: str
    schema: Mapping[str, Any]

    def problems(self, document: Mapping[str, Any]) -> list[str]:
        """List what of an object does not keep to the definition."""
        content = {key: value for key, value in document.items() if key not in _ENVELOPE}
        return list(_problems(content, self.schema, ""))

    def lacking(self, *path: str) -> Definition:
        """Return an older definition, which does not know the field at this path."""
        schema = copy.deepcopy(dict(self.schema))
        inner: Any = schema
        for key in path[:-1]:
            inner = inner["properties"][key]
        del inner["properties"][path[-1]]
        return Definition(self.api_version, self.kind, self.plural, schema)


def load() -> tuple[Definition, ...]:
    """Read all definitions."""
    found = []
    for file in sorted(resources.files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            document = json.loads(file.read_text())
            version = f"{document['group']}/{document['version']}"
            found.append(Definition(version, document["kind"], document["plural"], document["schema"]))
    return tuple(found)


def _problems(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if schema.get("quantity"):
        try:
            parse_exact(value)
        except ValueError as error:
            yield f"{path}: {error}"
        return
    wanted = schema["type"]
    if not isinstance(value, _TYPES[wanted]) or (wanted == "integer" and isinstance(value, bool)):
        yield f"{path}: must be of type {wanted}"
    elif isinstance(value, dict):
        yield from _object_problems(value, schema, path)
    elif isinstance(value, list):
        yield from _list_problems(value, schema["items"], path)


def _object_problems(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    known = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value:
            yield f"{path}.{key}: Required value"
    for key, inner in value.items():
        shape = known.get(key, schema.get("additionalProperties"))
        if shape is None:
            yield f"{path}.{key}: field not declared in schema"
        else:
            yield from _problems(inner, shape, f"{path}.{key}")


def _list_problems(items: Sequence[Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for number, item in enumerate(items):
        yield from _problems(item, schema, f"{path}[{number}]")
