"""JSON as Go's decoder takes it: keys in any case, null for absent, unknown keys overlooked.

The configurations of other device plugins were written for that decoder (encoding/json, Unmarshal), and their own
examples spell keys in several ways. What it overlooks is noted as a warning; what it refuses is a problem.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

from agent.config.shown import shown
from agent.errors import ConfigError

T = TypeVar("T")


def decode(text: str | bytes, source: str) -> Any:
    """Read JSON text; objects become lists of pairs in `Object`. Raises ConfigError."""
    try:
        return json.loads(text, object_pairs_hook=Pairs, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ConfigError(source, [f"is not JSON: {error}"]) from error


class Pairs(dict[str, tuple[str, Any]]):
    """A JSON object by lower-case key: the key as written, and the value. The last one of a key counts."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__((key.lower(), (key, value)) for key, value in pairs)


class GoReader:
    """Typed access to one object, noting problems and warnings with their path."""

    def __init__(self, value: Any, path: str, problems: list[str], warnings: list[str]) -> None:
        self.path = path
        self.problems = problems
        self.warnings = warnings
        self.asked: set[str] = set()
        self.value = value if isinstance(value, Pairs) else Pairs([])
        if value is not None and not isinstance(value, Pairs):
            self.note("", f"must be an object, is {_shown(value)}")

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path and key else self.path + key

    def note(self, key: str, text: str) -> None:
        self.problems.append(f"{self.at(key) or 'the document'}: {text}")

    def has(self, key: str) -> bool:
        """Tell whether the key is there with anything but null."""
        return self.value.get(key.lower(), ("", None))[1] is not None

    def take(self, key: str, default: T, want: str, kind: type) -> T:
        self.asked.add(key.lower())
        value: Any = self.value.get(key.lower(), (key, None))[1]
        if value is None:
            return default
        if type(value) is kind:
            return cast(T, value)
        self.note(key, f"must be {want}, is {shown(plain(value), key)}")
        return default

    def text(self, key: str) -> str:
        return self.take(key, "", "text", str)

    def flag(self, key: str) -> bool:
        return self.take(key, False, "true or false", bool)

    def whole(self, key: str) -> int:
        value = self.take(key, 0, "a whole number", int)
        if abs(value) < 1 << 63:
            return value
        self.note(key, f"must be a whole number, is {_shown(value)}")
        return 0

    def items(self, key: str) -> list[Any]:
        return self.take(key, [], "a list", list)

    def objects(self, key: str) -> list[GoReader]:
        path = self.at(key)
        return [GoReader(item, f"{path}[{i}]", self.problems, self.warnings) for i, item in enumerate(self.items(key))]

    def object(self, key: str) -> GoReader:
        value = self.take(key, None, "an object", Pairs)
        return GoReader(value, self.at(key), self.problems, self.warnings)

    def strings(self, key: str, want: str, convert: Callable[[str], T]) -> tuple[T, ...]:
        """Read a list of texts, each converted; a conversion says no with ValueError."""
        found = []
        for i, item in enumerate(self.items(key)):
            try:
                if not isinstance(item, str):
                    raise ValueError(item)
                found.append(convert(item))
            except ValueError:
                self.note(f"{key}[{i}]", f"must be {want}, is {_shown(item)}")
        return tuple(found)

    def done(self) -> None:
        """Warn of keys that nobody asked for."""
        for folded, (key, _) in self.value.items():
            if folded not in self.asked:
                self.warnings.append(f"{self.at(key)}: is not a known key")


def plain(value: Any) -> Any:
    """Turn what `decode` made into plain dicts and lists, keys as written."""
    if isinstance(value, Pairs):
        return {key: plain(inner) for key, inner in value.values()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return shown(plain(value))


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON value")
