"""The configuration's JSON Schema and its table of keys, made by running the reader over nothing.

A recorder takes the place of the reader and notes every key that is asked for, with what it must be, its default and
its meaning. So both say what the program reads, no more and no less. What one key has to do with another (a network
that must exist, say) is beyond a schema: `nodefabric check-config` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.config.document import read_config
from agent.config.reader import Reader
from agent.config.resources import read_resource
from agent.config.values import KINDS, RAIL_NIC_KINDS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TITLE = "Configuration of nodefabric"
MISSING = "is missing"
SELECT = "resources[].select"

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

    def path_to(self, key: str, default: Path | None, *, about: str = "") -> Any:
        super().path_to(key, default, about=about)
        return default

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


@dataclass(frozen=True, slots=True)
class Key:
    """A row of the table of keys."""

    path: str
    """resources[].select.pf"""
    value: str
    default: str
    about: str


def keys(schema: Schema | None = None) -> list[Key]:
    """List all keys, those of resources once with the kinds that have them."""
    found = schema or json_schema()
    resources = found["properties"]["resources"]["items"]["oneOf"]
    rows: list[Key] = []
    for key, said in found["properties"].items():
        rows += _rows(key, said) if key != "resources" else _resource_rows(said, resources)
    return rows


def markdown(rows: list[Key]) -> str:
    """Write rows as a table."""
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row.path}`", row.value, f"`{row.default}`" if row.default else "", row.about)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


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


def _resource_rows(said: Schema, resources: list[Schema]) -> list[Key]:
    rows: dict[str, tuple[Key, list[str]]] = {}
    for schema in resources:
        kind = schema["properties"]["kind"]["const"]
        for key, inner in schema["properties"].items():
            shown = {**inner, "enum": list(KINDS)} if key == "kind" else inner
            for row in _rows(f"resources[].{key}", {k: v for k, v in shown.items() if k != "const"}):
                rows.setdefault(row.path, (row, []))[1].append(kind)
    listed = [Key("resources", "list", "", said.get("description", ""))]
    for row, kinds in rows.values():
        above = rows.get(row.path.rpartition(".")[0])
        everywhere = above[1] if above is not None else list(KINDS)
        of = "" if set(kinds) == set(everywhere) else f" ({', '.join(dict.fromkeys(kinds))})"
        listed.append(Key(row.path, row.value, row.default, row.about + of))
    return listed


def _rows(path: str, said: Schema) -> list[Key]:
    """List a key and those below it."""
    rows = [Key(path, _value(said), _default(said), said.get("description", ""))]
    if "anyOf" in said and path != SELECT:
        return rows  # the same once more
    below: dict[str, Schema] = {}
    for each in (said, said.get("items", {}), *said.get("anyOf", ())[:1], *said.get("oneOf", ())):
        for key, inner in each.get("properties", {}).items():
            shown = {**inner, "enum": list(RAIL_NIC_KINDS)} if "const" in inner else inner
            below.setdefault(key, {k: v for k, v in shown.items() if k != "const"})
    dots = "[]." if said.get("type") == "array" else "."
    for key, inner in below.items():
        rows += _rows(f"{path}{dots}{key}", inner)
    return rows


def _value(said: Schema) -> str:
    if "enum" in said:
        return ", ".join(str(word) for word in said["enum"])
    if "anyOf" in said and "type" not in said:
        return "mapping, or a list of them"
    if said.get("type") == "array":
        inner = said.get("items", {})
        return f"list of {', '.join(inner['enum'])}" if "enum" in inner else "list"
    if said.get("type") in ("integer", "number"):
        return f"{said.get('minimum', 0):g} to {said['maximum']:g}" if "maximum" in said else "number"
    return {"string": "text", "boolean": "true or false"}.get(str(said.get("type")), "mapping")


def _default(said: Schema) -> str:
    default = said.get("default")
    if default is None or default is False:
        return "false" if default is False else ""
    return "true" if default is True else f"{default:g}" if isinstance(default, float) else str(default)
