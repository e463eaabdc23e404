"""Typed access to the mappings of a YAML document, noting problems with their path."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from agent.config.compat.keys import OF_OTHER_PLUGINS
from agent.config.template import IN_QUOTES, misplaced, touches_template
from agent.errors import ConfigError
from agent.model.printable import MASK, is_secret, masked_text, unknown

MAX_VALUES, MAX_DEPTH = 1000, 20
"""Of a network."""
PATH = re.compile(r"(?:/(?!\.\.(?:/|$))[^/\0\n]*)+")


def read_document(text: str | bytes, source: str) -> Any:
    """Read YAML text in which no key stands twice in a mapping. Raises ConfigError."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 -- a SafeLoader that also refuses repeated keys
    except Exception as error:  # for a bad tag or number PyYAML raises whatever int(), date() or a lookup raise
        raise ConfigError(source, [f"is not YAML: {_said(error)}"]) from error


def _said(error: Exception) -> str:
    """Tell what PyYAML says, which shows the line that it stumbled over, unless that line may hold a secret."""
    for mark in (getattr(error, "problem_mark", None), getattr(error, "context_mark", None)):
        if mark is not None and is_secret(_line_at(mark)):
            return (
                f"line {mark.line + 1}, column {mark.column + 1} (not shown, for it may be a secret): put it in quotes"
            )
    text = " ".join(str(error).split())
    mark = getattr(error, "problem_mark", None)
    if mark is not None and touches_template(mark.buffer or "", mark.pointer):
        text += f": {IN_QUOTES}"
    text = text.replace(' in "<byte string>",', " in").replace(' in "<unicode string>",', " in")
    return masked_text(text) or type(error).__name__


def _line_at(mark: yaml.Mark) -> str:
    text = mark.buffer or ""
    end = text.find("\n", mark.pointer)
    return text[text.rfind("\n", 0, mark.pointer) + 1 : end if end >= 0 else len(text)]


class _Loader(yaml.SafeLoader):
    """Plain YAML in which no key may stand twice in a mapping: the last one would win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key} stands twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class WrongEntry(ValueError):
    """Why an entry of a list is wrong, in place of what is wanted."""


class Reader:
    """Typed access to one mapping of the document, noting problems with their path.

    Every method that reads a key takes `about`, the key's meaning in one line: the JSON Schema and the table in the
    documentation are made from it.
    """

    def __init__(self, value: Any, path: str, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        self.asked: set[str] = set()
        if isinstance(value, dict) and all(isinstance(k, str) for k in value):
            self.value: dict[str, Any] = value
        else:
            self.value = {}
            self.note("", f"must be a mapping with text keys, is {shown(value)}")

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path and key else self.path + key

    def note(self, key: str, text: str) -> None:
        self.problems.append(f"{self.at(key) or 'the document'}: {text}")

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
        """Read any value that is `ok`; `schema` says the same in JSON Schema, as far as that can."""
        self.asked.add(key)
        if key not in self.value:
            return default
        value = self.value[key]
        if ok(value):
            return value
        self.note(key, f"must be {want}, is {shown(value, key)}{_unquoted(value, schema)}")
        return default

    def text(
        self,
        key: str,
        default: Any = None,
        want: str = "text",
        pattern: re.Pattern[str] | None = None,
        *,
        about: str = "",
    ) -> Any:
        schema = {"type": "string", **({"pattern": f"^(?:{pattern.pattern})$"} if pattern else {})}

        def ok(value: Any) -> bool:
            return isinstance(value, str) and (pattern is None or bool(pattern.fullmatch(value)))

        return self.take(key, default, want, ok, schema=schema, about=about)

    def choice(self, key: str, default: Any, words: tuple[str, ...], *, about: str = "") -> Any:
        """Read one of some words."""
        want = f"one of {', '.join(words)}"
        return self.take(key, default, want, words.__contains__, schema={"enum": list(words)}, about=about)

    def flag(self, key: str, default: bool, *, about: str = "") -> bool:
        schema = {"type": "boolean"}
        return bool(self.take(key, default, "true or false", _is_flag, schema=schema, about=about))

    def whole(self, key: str, default: Any, low: int, high: int, *, about: str = "") -> Any:
        want = f"a whole number from {low} to {high}"
        schema = {"type": "integer", "minimum": low, "maximum": high}
        return self.take(key, default, want, partial(_is_whole, low, high), schema=schema, about=about)

    def seconds(self, key: str, default: float, low: float, high: float, *, about: str = "") -> float:
        want = f"a number of seconds from {low:g} to {high:g}"
        schema = {"type": "number", "minimum": low, "maximum": high}
        return float(self.take(key, default, want, partial(_is_number, low, high), schema=schema, about=about))

    def path_to(self, key: str, default: Path | None, *, about: str = "") -> Any:
        found = self.text(key, None if default is None else str(default), "an absolute path", PATH, about=about)
        return None if found is None else Path(found)

    def section(self, key: str, *, about: str = "", or_many: bool = False) -> Reader:
        """Read an inner mapping. `or_many` says, to whoever describes the document, that it may be a list of them."""
        self.asked.add(key)
        return Reader(self.value.get(key, {}), self.at(key), self.problems)

    def sections(self, key: str, *, about: str = "") -> list[Reader]:
        items = self.take(key, [], "a list", _is_list, about=about)
        return [Reader(item, f"{self.at(key)}[{i}]", self.problems) for i, item in enumerate(items)]

    def strings(
        self,
        key: str,
        want: str,
        convert: Callable[[str], Any],
        *,
        schema: Mapping[str, Any] | None = None,
        about: str = "",
    ) -> tuple[Any, ...]:
        """Read a list of texts, each converted; a conversion says no with ValueError."""

        def text(value: Any) -> Any:
            if not isinstance(value, str):
                raise ValueError(value)
            return convert(value)

        return self.entries(key, want, text, schema={"type": "string", **(schema or {})}, about=about)

    def words(self, key: str, words: tuple[str, ...], *, about: str = "") -> tuple[str, ...]:
        """Read a list of some known words, none of them twice."""

        def known(value: Any) -> Any:
            if value not in words:
                raise ValueError(value)
            return value

        found = self.entries(key, f"one of {', '.join(words)}", known, schema={"enum": list(words)}, about=about)
        return tuple(dict.fromkeys(found))

    def entries(
        self,
        key: str,
        want: str,
        convert: Callable[[Any], Any],
        *,
        schema: Mapping[str, Any] | None = None,
        about: str = "",
    ) -> tuple[Any, ...]:
        """Read a list of anything, each entry converted; a conversion says no with ValueError or WrongEntry."""
        listed = {"type": "array", "items": dict(schema or {})}
        items = self.take(key, [], "a list", _is_list, schema=listed, about=about)
        found = []
        for i, item in enumerate(items):
            try:
                found.append(convert(item))
            except WrongEntry as error:
                self.note(f"{key}[{i}]", f"{shown(item)}: {error}")
            except ValueError:
                self.note(f"{key}[{i}]", f"must be {want}, is {shown(item)}{_unquoted(item, schema)}")
        return tuple(found)

    def refuse_foreign(self) -> None:
        """Note the keys of other plugins' files, whatever this mapping is."""
        for key in self.value:
            if key in OF_OTHER_PLUGINS and key not in self.asked:
                self.asked.add(key)
                self.note(key, OF_OTHER_PLUGINS[key])

    def done(self) -> None:
        self.refuse_foreign()
        for key in self.value:
            if key not in self.asked:
                self.note(key, unknown(key, self.asked - OF_OTHER_PLUGINS.keys(), "key here"))


def is_plain_json(value: Any) -> bool:
    """Tell whether JSON can express the value, in a bounded size: aliases can make it endless."""
    waiting = [(value, 0)]
    for _ in range(MAX_VALUES):
        if not waiting:
            return True
        item, depth = waiting.pop()
        if isinstance(item, dict) and all(isinstance(key, str) for key in item):
            waiting.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list):
            waiting.extend((inner, depth + 1) for inner in item)
        elif isinstance(item, float):
            if not math.isfinite(item):
                return False
        elif type(item) is int:
            if abs(item) >= 1 << 63:
                return False
        elif item is not None and not isinstance(item, str | bool):
            return False
        if depth > MAX_DEPTH:
            return False
    return False


def is_mapping(value: Any) -> bool:
    """Tell whether a value of the document is a mapping."""
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_whole(low: int, high: int, value: Any) -> bool:
    return type(value) is int and low <= value <= high


def _is_number(low: float, high: float, value: Any) -> bool:
    return type(value) in (int, float) and low <= value <= high


def _unquoted(value: Any, schema: Mapping[str, Any] | None) -> str:
    """Say what helps if YAML has made a number of what should be text (8086 is no ID, "8086" is), or of templates."""
    if (schema or {}).get("type") == "string" and type(value) in (int, float):
        return ", a number: put it in quotes"
    return misplaced(value) if is_plain_json(value) else ""  # aliases can make another endless


class _Short(reprlib.Repr):
    """Writes a value in short, without secrets. Aliases can make a short document endless when written out."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, 80, 80

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict({k: MASK if is_secret(str(k)) else v for k, v in x.items()}, level)


def shown(value: Any, key: str = "") -> str:
    """Show a value of the document, which stands at `key`, in at most 80 characters, without secrets."""
    if is_secret(key):
        return MASK
    try:
        text = masked_text(_Short().repr(value))
    except ValueError:
        return "a number too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."
