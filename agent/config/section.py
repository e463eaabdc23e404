"""What all models of documents have in common, how a wrong document is read as far as it is right, and what is said.

A section is a frozen dataclass. pydantic reads a mapping into it: a key is the field's name in camel case (or its
alias), its annotation says what the value must be, and the docstring below it what the key means.

    @dataclass(frozen=True, slots=True)
    class Endpoints(Section):
        port: Annotated[int, whole(0, 65535)] = 9808
        "Port of the endpoints; 0 takes a free one"
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from agent.config.removed_keys import OF_OTHER_PLUGINS
from agent.config.template import misplaced
from agent.errors import RequestInvalid
from agent.model.printable import MASK, is_secret, masked_text, unknown

T = TypeVar("T")
Loc = tuple[str | int, ...]
MOST_AT_ONCE = 32
"""How many mistakes of one mapping, or of one request, are listed: a request has up to 1 MiB."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a key, or what is below it, is refused."""

    loc: Loc
    text: str


@dataclass(frozen=True, slots=True)
class Problem:
    loc: Loc
    text: str

    def __str__(self) -> str:
        return f"{path_of(self.loc) or 'the document'}: {self.text}"

    @property
    def sentence(self) -> str:
        """The problem as a sentence whose subject is the path."""
        return f"{path_of(self.loc)} {self.text}".lstrip()


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping of a document."""

    __pydantic_config__ = ConfigDict(extra="forbid", alias_generator=to_camel)
    what: ClassVar[str] = "key here"

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> Iterable[str]:
        """List the keys that this mapping may have."""
        return keys_of(cls)

    @classmethod
    def said(cls, given: Any, info: ValidationInfo) -> Mapping[str, Any]:
        """Return the keys that are given. Raises PydanticCustomError for what has none."""
        if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
            raise must_be("a mapping with text keys")
        return given

    @classmethod
    def refused(cls, given: Mapping[str, Any]) -> Iterator[Refusal]:
        """List what is wrong with the keys themselves, whatever their values."""
        known = cls.known(given)
        for key in given:
            if key not in keys_of(cls):
                yield Refusal((key,), OF_OTHER_PLUGINS.get(key) or unknown(key, known, cls.what))

    def contradictions(self) -> Iterable[Refusal]:
        """List values that do not go together. Asked once each is right by itself."""
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, given: Any, read: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        said, known = cls.said(given, info), keys_of(cls)
        wrong = [*islice(cls.refused(said), MOST_AT_ONCE)]
        made = read_beside(wrong, read, {key: value for key, value in said.items() if key in known})
        refuse(chain(wrong, made.contradictions()))
        return made


@dataclass(frozen=True, slots=True)
class JsonSection(Section):
    """An object of JSON from outside, in which null is the same as absent."""

    what: ClassVar[str] = "key"
    overlooked: ClassVar[bool] = False
    """Whether unknown keys are."""

    @classmethod
    def is_foreign(cls, key: str) -> bool:
        """Return whether a key that has no meaning here is fine all the same."""
        return cls.overlooked

    @classmethod
    def refused(cls, given: Mapping[str, Any]) -> Iterator[Refusal]:
        known = keys_of(cls)
        for key in given:
            if key not in known and not cls.is_foreign(key):
                yield Refusal((key,), unknown(key, (k for k in known if not cls.is_foreign(k)), cls.what))

    @classmethod
    def said(cls, given: Any, info: ValidationInfo) -> Mapping[str, Any]:
        if not isinstance(given, dict):
            raise must_be("an object")
        if info.context and info.context.get("fold"):
            return folded(given, keys_of(cls))
        return {key: value for key, value in given.items() if value is not None}


def folded(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Spell keys as they are known, as Go's encoding/json takes them: in any case, the last that is not null wins."""
    spelled = {fold(key): key for key in known}
    found = ((spelled.get(fold(key)), value) for key, value in given.items() if value is not None)
    return {key: value for key, value in found if key is not None}


def fold(key: str) -> str:
    folded = key.casefold()  # maps the long s and the Kelvin sign to letters, as Go's folding does
    return folded if len(folded) == len(key) else key


_KEYS: dict[type[Any], Mapping[str, str]] = {}
"""Made once: a pod's start waits for a configuration to be read."""


def keys_of(cls: type[Any]) -> Mapping[str, str]:
    """Map the keys of a section to its fields; one that the JSON Schema skips is no key."""
    if cls in _KEYS:
        return _KEYS[cls]
    hints = get_type_hints(cls, include_extras=True)
    found: dict[str, str] = {}
    for each in fields(cls):
        said = getattr(hints[each.name], "__metadata__", ())
        aliases = (one.alias for one in said if isinstance(one, FieldInfo) and one.alias)
        if not any(isinstance(one, cast(type, SkipJsonSchema)) for one in said):
            found[next(aliases, to_camel(each.name))] = each.name
    _KEYS[cls] = found
    return found


def must_be(want: str, *, is_text: bool = False) -> PydanticCustomError:
    return PydanticCustomError("must_be", "must be {want}", {"want": want, "is_text": is_text})


def wrong(text: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{text}", {"text": text})


def refuse(found: Iterable[Refusal]) -> None:
    """Raise ValidationError if anything is refused, with the first MOST_AT_ONCE."""
    if lines := [_line(each) for each in islice(found, MOST_AT_ONCE)]:
        raise ValidationError.from_exception_data("", lines)


def _line(refusal: Refusal) -> InitErrorDetails:
    return InitErrorDetails(type=wrong(refusal.text), loc=refusal.loc, input=None)


def read_beside(wrong: Sequence[Refusal], read: Callable[[Any], T], given: Any) -> T:
    """Read values. Raises ValidationError with what is refused beside them, and with all that is wrong in them."""
    try:
        return read(given)
    except ValidationError as error:
        if not wrong:
            raise
        lines = [_line(each) for each in wrong]
        for line in error.errors(include_url=False):
            context, kind = line.get("ctx", {}), line["type"]
            is_ours = kind in ("wrong", "must_be")
            again = PydanticCustomError(cast(Any, kind), "", context) if is_ours else kind
            lines.append(InitErrorDetails(type=again, loc=line["loc"], input=line["input"], ctx=context))
        raise ValidationError.from_exception_data("", lines) from None


def read(adapter: TypeAdapter[T], document: Any) -> tuple[T, tuple[Problem, ...]]:
    """Read a document as far as it is right, with what is wrong in it. None of its own keys may be required.

    Of a section the keys with a mistake are left out, of all else the whole, and the rest is read again.
    """
    problems: list[Problem] = []
    while True:
        try:
            return adapter.validate_python(document), tuple(problems)
        except ValidationError as error:
            found, known = problems_of(error), {each.loc for each in problems}
            problems += [each for each in found if each.loc not in known]
            for part in {each.loc[:2] for each in found}:
                document = _without(document, *part)


def _without(document: Any, *loc: str | int) -> dict[str | int, Any]:
    if not isinstance(document, dict) or not loc:
        return {}
    first, *rest = loc
    inner = document.get(first)
    if rest and isinstance(inner, dict) and rest[0] in inner:
        return {**document, first: _without(inner, *rest)}
    return {key: value for key, value in document.items() if key != first}


def checked(adapter: TypeAdapter[T], document: Any, **context: Any) -> T:
    """Read a document of a request. Raises RequestInvalid with what is wrong in it."""
    try:
        return adapter.validate_python(document, context=context)
    except ValidationError as error:
        found = problems_of(error)[:MOST_AT_ONCE]
        text = "; ".join(each.sentence for each in found)
        raise RequestInvalid(text if len(found) < MOST_AT_ONCE else f"{text}; and perhaps more") from None


def problems_of(error: ValidationError) -> list[Problem]:
    """List what pydantic, or a section, refuses."""
    lines = [(_loc(line["loc"]), line) for line in error.errors(include_url=False)]
    return [Problem(loc, _text(line, loc)) for loc, line in lines]


def path_of(loc: Sequence[str | int]) -> str:
    """Write a place in a document: resources[0].select.pf"""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            text = part if len(part) <= 80 else f"{part[:77]}..."
            text = text if text.isprintable() else ascii(text)
            path += f'."{text}"' if path and not text.replace("-", "").isidentifier() else f".{text}" if path else text
    return path


def _loc(loc: Loc) -> Loc:
    """Leave out the names of alternatives."""
    return tuple(part for part in loc if not (isinstance(part, str) and part.startswith("<")))


def _text(line: Any, loc: Loc) -> str:
    context = line.get("ctx", {})
    if line["type"] == "wrong":
        return str(context["text"])
    if line["type"] == "missing":
        return "is missing"
    key = next((part for part in reversed(loc) if isinstance(part, str)), "")
    value = shown(line["input"], key if loc and loc[-1] == key else "")
    if line["type"] == "must_be":
        return f"must be {context['want']}, is {value}{advice(line['input'], is_text=context.get('is_text', False))}"
    return f"{line['msg'][0].lower()}{line['msg'][1:]}, is {value}"


# --------------------------------------------------------------------------------------------------- kinds of values


PATH = re.compile(r"(?:/(?!\.\.(?:/|$))[^/\0\n]*)+")


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value is read. Whatever pydantic refuses, the message is that it must be `want`."""

    want: str
    schema: CoreSchema = field(hash=False)
    json: Mapping[str, Any] = field(hash=False)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(
            self.schema,
            custom_error_type="must_be",
            custom_error_message="must be {want}",
            custom_error_context={"want": self.want, "is_text": self.json.get("type") == "string"},
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return dict(self.json)


def whole(low: int, high: int) -> Kind:
    """A whole number."""
    schema = core_schema.int_schema(strict=True, ge=low, le=high)
    return Kind(f"a whole number from {low} to {high}", schema, {"type": "integer", "minimum": low, "maximum": high})


def seconds(low: float, high: float) -> Kind:
    """A time, whole or not."""
    schema = core_schema.float_schema(strict=True, ge=low, le=high, allow_inf_nan=False)
    want = f"a number of seconds from {low:g} to {high:g}"
    return Kind(want, schema, {"type": "number", "minimum": low, "maximum": high})


FLAG = Kind("true or false", core_schema.bool_schema(strict=True), {"type": "boolean"})


def value(want: str, convert: Callable[[Any], Any], json: Mapping[str, Any]) -> Kind:
    """Anything that `convert` takes; it refuses with ValueError."""
    return Kind(want, core_schema.no_info_plain_validator_function(convert), json)


def string(want: str, convert: Callable[[str], Any], json: Mapping[str, Any] | None = None) -> Kind:
    """A text that `convert` takes; it refuses with ValueError."""

    def read(given: Any) -> Any:
        if not isinstance(given, str):
            raise ValueError
        return convert(given)

    return value(want, read, {"type": "string", **(json or {})})


def matching(want: str, pattern: re.Pattern[str]) -> Kind:
    """A text of a pattern."""

    def read(given: str) -> str:
        if not pattern.fullmatch(given):
            raise ValueError
        return given

    return string(want, read, {"pattern": f"^(?:{pattern.pattern})$"})


def that(want: str, ok: Callable[[str], object]) -> Kind:
    """A text; an empty one is none. `ok` returns how it is spelled here, or whether it is right."""

    def read(given: str) -> str | None:
        found = given == "" or ok(given)
        if not found:
            raise ValueError
        return found if isinstance(found, str) else given or None

    return string(want, read)


def choice(*words: str, convert: Callable[[str], str | None] = str) -> Kind:
    """One of some words."""

    def read(given: Any) -> str | None:
        if not isinstance(given, str) or given not in words:
            raise ValueError
        return convert(given)

    told = [word for word in words if word]
    want = f"one of {', '.join(told)}" if len(told) > 1 else told[0]
    return value(want, read, {"enum": told})


def word(*words: str, convert: Callable[[str], str] = str) -> Kind:
    """One of some words; an empty text is none."""
    return choice("", *words, convert=lambda given: convert(given) or None)


def _absolute(given: str) -> Path:
    if not PATH.fullmatch(given):
        raise ValueError
    return Path(given)


FOLDER = string("an absolute path", _absolute, {"pattern": f"^(?:{PATH.pattern})$"})
"""A file or a folder."""


def _list(given: Any) -> Any:
    if not isinstance(given, list):
        raise must_be("a list")
    return given


LIST = BeforeValidator(_list)
Many = Annotated[tuple[T, ...], LIST]
Once = Annotated[tuple[T, ...], LIST, AfterValidator(lambda words: tuple(dict.fromkeys(words)))]
"""A list whose repeated words count once."""
Flag = Annotated[bool, FLAG]
Folder = Annotated[Path, FOLDER]


@dataclass(frozen=True, slots=True)
class Through:
    """Reads a value as a model, and makes of that what the program works with."""

    model: Any
    convert: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.convert, handler.generate_schema(self.model))


class OneOrMany:
    """Reads a mapping, or a list of them, which `join` makes one."""

    def __init__(self, join: Callable[[tuple[Any, ...]], Any]) -> None:
        self._join = join

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        one = handler(source)
        many = core_schema.no_info_after_validator_function(
            lambda found: self._join(tuple(found)), core_schema.list_schema(one, strict=True)
        )
        return core_schema.tagged_union_schema(
            {"<one>": one, "<many>": many}, lambda given: "<many>" if isinstance(given, list) else "<one>"
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        one = handler(schema["choices"]["<one>"])
        return {"anyOf": [one, {"type": "array", "items": one}]}


# ------------------------------------------------------------------------------------- values, as messages show them


MAX_VALUES, MAX_DEPTH = 1000, 20
"""Of a network."""


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


def advice(value: Any, *, is_text: bool) -> str:
    """Say what helps if YAML has made a number of what should be text (8086 is no ID, "8086" is), or of templates."""
    if is_text and type(value) in (int, float):
        return ", a number: put it in quotes"
    return misplaced(value) if is_plain_json(value) else ""  # aliases can make another endless


def is_plain_json(value: Any) -> bool:
    """Return whether JSON can express the value, in a bounded size: aliases can make it endless."""
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
