"""The configuration's JSON Schema, made of the models.

What one key has to do with another (a network that must exist, say) is beyond a schema: `nodefabric
check-config` knows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from agent.config.removed_keys import GONE
from agent.config.resources import KINDS, RAIL_NIC_KINDS, RailNic, Resource, Select, kinds_of
from agent.config.section import Section
from agent.config.values import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TITLE = "Configuration of nodefabric"

Schema = dict[str, Any]


def json_schema() -> Schema:
    """Make the JSON Schema of a configuration."""
    # The docstring below a field says what its key means. To find those takes time, which a start does not have.
    Section.__pydantic_config__["use_attribute_docstrings"] = True
    made = TypeAdapter(Config).json_schema()
    found: Schema = _plain(made, made.get("$defs", {}))
    resource = found["properties"]["resources"]["items"]
    found["properties"]["resources"]["items"] = {"oneOf": [_resource(resource, kind) for kind in KINDS]}
    for path, text in GONE.items():
        *outer, key = path.split(".")
        section = found
        for name in outer:
            section = section["properties"][name]
        section["properties"][key] = {"deprecated": True, "description": text}
    return {"$schema": DIALECT, "title": TITLE, **found}


def _plain(said: Any, defined: Mapping[str, Any]) -> Any:
    """Put in what is referred to, and leave out titles, empty defaults, and what is no key."""
    if isinstance(said, list):
        return [_plain(each, defined) for each in said]
    if not isinstance(said, dict):
        return said
    if "$ref" in said:
        said = {**defined[said["$ref"].rpartition("/")[2]], **said}
    kept = {key: value for key, value in said.items() if key not in ("$ref", "$defs", "title", "properties", "default")}
    found: Schema = {key: _plain(value, defined) for key, value in kept.items()}
    if isinstance(said.get("properties"), dict):
        found["properties"] = {key: _plain(each, defined) for key, each in said["properties"].items()}
    if isinstance(default := said.get("default"), str | int | float) and default != "":
        found["default"] = default
    if isinstance(text := said.get("description"), str):
        found["description"] = " ".join(text.split())
    return found


def _resource(schema: Schema, kind: str) -> Schema:
    """Spell out what an entry of one kind may have."""
    found = _of_kind(schema, kind, kinds_of(Resource))
    properties = found["properties"]
    for key in ("select", "gpu"):
        if key in properties:
            properties[key] = _selector(properties[key], kind if key == "select" else "gpu")
    if "nic" in properties:
        nic = properties["nic"]
        properties["nic"] = {
            "description": nic.pop("description"),
            "oneOf": [_rail_nic(nic, each) for each in RAIL_NIC_KINDS],
        }
    return {"title": f"kind {kind}", **found}


def _rail_nic(schema: Schema, kind: str) -> Schema:
    found = _of_kind(schema, kind, kinds_of(RailNic))
    found["properties"]["select"] = _selector(found["properties"]["select"], kind)
    return found


def _of_kind(schema: Schema, kind: str, kinds: Mapping[str, tuple[str, ...]]) -> Schema:
    found = copy.deepcopy(schema)
    found["properties"] = {key: each for key, each in found["properties"].items() if kind in kinds.get(key, (kind,))}
    said = found["properties"]["kind"]
    default = {"default": kind} if said.get("default") == kind else {}
    found["properties"]["kind"] = {"description": said["description"], "const": kind, **default}
    return found


def _selector(schema: Schema, kind: str) -> Schema:
    kinds, one = kinds_of(Select), schema["anyOf"][0]
    kept = {key: each for key, each in one["properties"].items() if kind in kinds.get(key, (kind,))}
    inner = {**one, "properties": kept}
    return {**schema, "anyOf": [inner, {"type": "array", "items": inner}]}
