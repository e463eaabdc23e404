"""The configuration's JSON Schema, made by running the reader over nothing.

A recorder takes the place of the reader and notes every key that is asked for, with what it must be, its default and
its meaning. So it says what the program reads, no more and no less. What one key has to do with another (a network
that must exist, say) is beyond a schema: `nodefabric check-config` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agent.config.document import read_config
from agent.config.reader import Reader
from agent.config.resources import KINDS, RAIL_NIC_KINDS, read_resource

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TITLE = "Configuration of nodefabric"
MISSING = "is missing"

Schema = dict[str, Any]


class Recorder(Reader):
    """A reader of an empty mapping that remembers what it was asked for."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        """`given` are values of some keys, on which it depends what else is asked for."""
        super().__init__({}, "", [])
        self.given = dict(given or {})
        self.properties: dict[str, Schema] = {}
        self.required: list[str] = []
        self.children: dict[str, tuple[Recorder, bool]] = {}
        self.is_closed = False

    def take(
        self,
        key: str,
        default: Any,
        want: str,
        ok: Callable[[Any], bool],
        *,
        schema: Mapping[str, Any] | None = None,
        about: str = "",
    ) -> Any:
        said: Schema = dict(schema or {})
        if about:
            said["description"] = about
        if default not in (None, [], {}, ""):
            said["default"] = default
        self.properties[key] = said
        return self.given.get(key, default)

    def note(self, key: str, text: str) -> None:
        if text == MISSING:
            self.required.append(key)

    def section(self, key: str, *, about: str = "", or_many: bool = False) -> Reader:
        child = Recorder(self.given.get(key))
        self.children[key] = child, or_many
        self.properties[key] = {"description": about} if about else {}
        return child

    def sections(self, key: str, *, about: str = "") -> list[Reader]:
        child = Recorder()
        self.children[key] = child, False
        self.properties[key] = {"type": "array", **({"description": about} if about else {})}
        return [child]

    def done(self) -> None:
        self.is_closed = True

    def schema(self) -> Schema:
        """Spell out what was asked for."""
        properties = {key: dict(said) for key, said in self.properties.items()}
        for key, (child, or_many) in self.children.items():
            inner = child.schema()
            if properties[key].get("type") == "array":
                properties[key]["items"] = inner
            elif or_many:
                properties[key]["anyOf"] = [inner, {"type": "array", "items": inner}]
            else:
                properties[key] |= inner
        found: Schema = {"type": "object", "properties": properties}
        if self.required:
            found["required"] = self.required
        if self.is_closed:
            found["additionalProperties"] = False
        return found


def json_schema() -> Schema:
    """Make the JSON Schema of a configuration."""
    top = Recorder()
    read_config(top, "")
    found = top.schema()
    found["properties"]["resources"]["items"] = {"oneOf": [_resource(kind) for kind in KINDS]}
    return {"$schema": DIALECT, "title": TITLE, **found}


def _resource(kind: str) -> Schema:
    """Spell out what an entry of one kind may have."""
    found: list[Schema] = []
    for given in [{"nic": {"kind": nic}} for nic in RAIL_NIC_KINDS] if kind == "rail" else [{}]:
        recorder = Recorder({"kind": kind, **given})
        read_resource(recorder)
        found.append(recorder.schema())
        if kind == "rail":
            found[-1]["properties"]["nic"]["properties"]["kind"] = _fixed(
                found[-1]["properties"]["nic"], given["nic"]["kind"]
            )
    first = found[0]
    first["properties"]["kind"] = _fixed(first, kind)
    if kind == "rail":
        nics = [each["properties"]["nic"] for each in found]
        nics[0].pop("description", None)
        first["properties"]["nic"] = {"description": "The other half of a rail", "oneOf": nics}
    return {"title": f"kind {kind}", **first}


def _fixed(schema: Schema, kind: str) -> Schema:
    """Say of the key `kind` that it is this one."""
    said = schema["properties"]["kind"]
    fixed = {key: value for key, value in said.items() if key in ("description",)}
    default = {"default": said["default"]} if said.get("default") == kind else {}
    return {**fixed, "const": kind, **default}
