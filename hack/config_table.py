"""The table of the configuration's keys in docs/configuration.md, from the JSON Schema."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from agent.config.resources import KINDS, RAIL_NIC_KINDS

SELECT = "resources[].select"

SHOWN = 8
"""Of more words than these a list's meaning says enough."""

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Key:
    """A row of the table of keys."""

    path: str
    """resources[].select.pf"""
    value: str
    default: str
    about: str


def keys(schema: Schema) -> list[Key]:
    """List all keys, those of resources once with the kinds that have them."""
    resources = schema["properties"]["resources"]["items"]["oneOf"]
    rows: list[Key] = []
    for key, said in schema["properties"].items():
        rows += _rows(key, said) if key != "resources" else _resource_rows(said, resources)
    return rows


def markdown(rows: list[Key]) -> str:
    """Write rows as a table."""
    lines = ["| key | value, `default` | meaning |", "|---|---|---|"]
    above = {row.path.rpartition(".")[0] for row in rows}
    for row in rows:
        if row.value == "mapping" and row.path in above:
            continue  # its keys say it
        cells = (f"`{row.path}`", _with_default(row), row.about)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _with_default(row: Key) -> str:
    """Mark the default among the words that are allowed, or add it."""
    words = re.split(r"(, or |, | or )", row.value)
    if row.default in words:
        return "".join(f"`{word}`" if word == row.default else word for word in words)
    return f"{row.value}, `{row.default}`" if row.default else row.value


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
        is_said = set(kinds) == set(everywhere) or row.path.startswith(f"{SELECT}.")
        of = "" if is_said else f" ({', '.join(dict.fromkeys(kinds))})"
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
            if inner.get("deprecated"):
                continue
            shown = {**inner, "enum": list(RAIL_NIC_KINDS)} if "const" in inner else inner
            below.setdefault(key, {k: v for k, v in shown.items() if k != "const"})
    dots = "[]." if said.get("type") == "array" else "."
    for key, inner in below.items():
        rows += _rows(f"{path}{dots}{key}", inner)
    return rows


def _value(said: Schema) -> str:
    if "enum" in said:
        return ", ".join(str(word) for word in said["enum"])
    if any("const" in each for each in said.get("anyOf", ())):
        return ", or ".join(str(each["const"]) if "const" in each else _value(each) for each in said["anyOf"])
    if "anyOf" in said and "type" not in said:
        is_text = any(each.get("type") == "string" for each in said["anyOf"])
        return "text, or a mapping" if is_text else "mapping, or a list of them"
    if said.get("type") == "array":
        inner = said.get("items", {})
        return f"list of {', '.join(inner['enum'])}" if 0 < len(inner.get("enum", ())) <= SHOWN else "list"
    if said.get("type") in ("integer", "number"):
        return f"{said.get('minimum', 0):g} to {said['maximum']:g}" if "maximum" in said else "number"
    return {"string": "text", "boolean": "true or false"}.get(str(said.get("type")), "mapping")


def _default(said: Schema) -> str:
    default = said.get("default")
    if default is None or default is False:
        return "false" if default is False else ""
    return "true" if default is True else f"{default:g}" if isinstance(default, float) else str(default)
