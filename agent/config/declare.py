"""The keys of a section as fields of a frozen dataclass: one line has what a key must be, its default, its meaning.

    @dataclass(frozen=True, slots=True)
    class Endpoints:
        port: int = declare.whole(9808, 0, 65535, about="Port of the endpoints; 0 takes a free one")

The key is the field's name in camel case. The file, the JSON Schema and the table in the documentation follow from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agent.config.reader import Reader

T = TypeVar("T")
_READ, _KEY, _KINDS = "read", "key", "kinds"


def read(cls: type[T], reader: Reader) -> T:
    """Read a section. What contradicts within it is noted, if the class has a method `contradictions`."""
    found = cls(**read_fields(cls, reader))
    for key, text in getattr(found, "contradictions", tuple)():
        reader.note(key, text)
    reader.done()
    return found


def read_fields(cls: type[Any], reader: Reader, kind: str | None = None) -> dict[str, Any]:
    """Read what was declared with the functions of this module and is for this kind; the caller reads other fields."""
    return {
        f.name: f.metadata[_READ](reader, key_of(f), f.default)
        for f in fields(cls)
        if _READ in f.metadata and kind in f.metadata.get(_KINDS, (kind,))
    }


def foreign_keys(cls: type[Any], kind: str) -> dict[str, tuple[str, ...]]:
    """Map the keys that are for other kinds only to these."""
    found = ((key_of(f), f.metadata.get(_KINDS, (kind,))) for f in fields(cls))
    return {key: kinds for key, kinds in found if kind not in kinds}


def key_of(of: Field[Any]) -> str:
    """Spell a field as the file does: kubelet_dir → kubeletDir."""
    first, *rest = of.name.split("_")
    return str(of.metadata.get(_KEY) or first + "".join(word.title() for word in rest))


def only(kinds: tuple[str, ...], declared: Any) -> Any:
    """Declare a key that sections of these kinds have."""
    return field(default=declared.default, metadata={**declared.metadata, _KINDS: kinds})


def flag(default: bool, *, about: str) -> Any:
    """Declare true or false."""
    return _declared(default, partial(Reader.flag, about=about))


def whole(default: int | None, low: int, high: int, *, key: str = "", about: str) -> Any:
    """Declare a whole number."""
    return _declared(default, partial(Reader.whole, low=low, high=high, about=about), key)


def seconds(default: float, low: float, high: float, *, about: str) -> Any:
    """Declare a time."""
    return _declared(default, partial(Reader.seconds, low=low, high=high, about=about))


def choice(default: str, words: tuple[str, ...], *, about: str) -> Any:
    """Declare one of some words."""
    return _declared(default, partial(Reader.choice, words=words, about=about))


def path(default: Path | None, *, about: str) -> Any:
    """Declare an absolute path."""
    return _declared(default, partial(Reader.path_to, about=about))


def text(default: str | None, want: str, pattern: re.Pattern[str], *, about: str) -> Any:
    """Declare a text of this pattern; `want` says it in words."""
    return _declared(default, partial(Reader.text, want=want, pattern=pattern, about=about))


def value(default: Any, want: str, ok: Callable[[Any], bool], *, schema: Mapping[str, Any], about: str) -> Any:
    """Declare anything that is `ok`."""
    return _declared(default, partial(_take, want=want, ok=ok, schema=schema, about=about))


def count(high: int, word: str, *, about: str) -> Any:
    """Declare a whole number from 1 on, which is the default, or a word in its place."""
    schema = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": high}, {"const": word}]}
    want = f"a whole number from 1 to {high}, or {word}"
    return value(1, want, lambda v: v == word or (type(v) is int and 1 <= v <= high), schema=schema, about=about)


def words(known: tuple[str, ...], *, default: tuple[str, ...] = (), may_be_empty: bool = False, about: str) -> Any:
    """Declare a list of some known words. `may_be_empty`: an empty list means none, not the default."""
    return _declared(default, partial(_words, words=known, may_be_empty=may_be_empty, about=about))


def strings(
    want: str,
    convert: Callable[[str], Any],
    *,
    default: tuple[Any, ...] = (),
    key: str = "",
    schema: Mapping[str, Any] | None = None,
    may_be_empty: bool = False,
    about: str,
) -> Any:
    """Declare a list of texts, each converted; a conversion says no with ValueError.

    `may_be_empty`: an empty list means none, not the default.
    """
    how = partial(_strings, want=want, convert=convert, schema=schema, may_be_empty=may_be_empty, about=about)
    return _declared(default, how, key)


def entries(want: str, convert: Callable[[Any], Any], *, schema: Mapping[str, Any], about: str) -> Any:
    """Declare a set of anything, each entry converted; a conversion says no with ValueError."""
    return _declared(frozenset(), partial(_entries, want=want, convert=convert, schema=schema, about=about))


def listed(want: str, convert: Callable[[Any], Any], *, schema: Mapping[str, Any], about: str) -> Any:
    """Declare a list of anything in its order, each entry converted; a conversion says no with ValueError."""
    return _declared((), partial(_listed, want=want, convert=convert, schema=schema, about=about))


def section(cls: type[Any], *, by: Callable[[Reader], Any] | None = None, about: str) -> Any:
    """Declare an inner section, read as `by` says if its keys depend on each other."""
    return _declared(cls(), partial(_section, by=by or partial(read, cls), about=about))


def sections(by: Callable[[Reader], Any], *, about: str) -> Any:
    """Declare a list of inner sections, each read by a function that gives None for one that is wrong."""
    return _declared((), partial(_sections, by=by, about=about))


def _declared(default: Any, how: Callable[..., Any], key: str = "") -> Any:
    return field(default=default, metadata={_READ: how, _KEY: key})


def _take(reader: Reader, key: str, default: Any, **said: Any) -> Any:
    return reader.take(key, default, **said)  # the reader's own: one that makes the schema has another


def _words(reader: Reader, key: str, default: tuple[str, ...], *, may_be_empty: bool, **said: Any) -> tuple[str, ...]:
    return _or_default(reader.words(key, **said), reader, key, default, may_be_empty)


def _strings(reader: Reader, key: str, default: tuple[Any, ...], *, may_be_empty: bool, **said: Any) -> tuple[Any, ...]:
    return _or_default(reader.strings(key, **said), reader, key, default, may_be_empty)


def _or_default(
    found: tuple[Any, ...], reader: Reader, key: str, default: tuple[Any, ...], may_be_empty: bool
) -> tuple[Any, ...]:
    return found if found or (may_be_empty and key in reader.value) else default


def _entries(reader: Reader, key: str, default: frozenset[Any], **said: Any) -> frozenset[Any]:
    return frozenset(reader.entries(key, **said)) or default


def _listed(reader: Reader, key: str, default: tuple[Any, ...], **said: Any) -> tuple[Any, ...]:
    return reader.entries(key, **said) or default


def _sections(reader: Reader, key: str, default: Any, *, by: Callable[[Reader], Any], about: str) -> tuple[Any, ...]:
    found = (by(inner) for inner in reader.sections(key, about=about))
    return tuple(each for each in found if each is not None)


def _section(reader: Reader, key: str, default: Any, *, by: Callable[[Reader], Any], about: str) -> Any:
    return by(reader.section(key, about=about))
