"""JSON from outside, decoded within bounds and read field by field, each error with its path."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from agent.errors import RequestInvalid, Unavailable
from agent.model.printable import masked

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
"""The C scanner and encoder of Python's json give up at about a thousand; no configuration needs a tenth of this."""
MAX_DIGITS = 400
_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a letter beyond the basic plane, as JSON may spell it."""
T = TypeVar("T")
_WORDS: Mapping[type, str] = {str: "a text", int: "a whole number", dict: "an object", list: "a list"}


class NotJson(RequestInvalid):
    """A document cannot be decoded, or two readers could understand it differently."""


def decode(text: bytes, what: str) -> Any:
    """Decode JSON. Raises NotJson for anything that two readers could understand differently.

    `what` names the document in errors. Besides broken JSON that is: text that is not UTF-8, or that stands for
    none (half of a surrogate pair), a key that an object has twice, NaN and Infinity, numbers beyond a float,
    nesting beyond any need.
    """
    if len(text) > MAX_BYTES:
        raise NotJson(f"{what} has {len(text)} bytes, and {MAX_BYTES} are allowed: make it smaller")
    try:
        written = text.decode("utf-8")
        if written.startswith("\ufeff"):
            raise ValueError("Unexpected UTF-8 BOM: leave it out")
        document = _STRICT.decode(written)
    except _KeyTwice as error:
        raise NotJson(f"{error} is in {what} twice: leave one") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise NotJson(f"{what} is not JSON: {error}") from error
    if is_deep(document):
        raise NotJson(f"{what} is nested more than {MAX_DEPTH} levels deep")
    if _SURROGATE.search(text) and _has_half_a_pair(document):
        raise NotJson(f"{what} is not JSON: half of a surrogate pair stands for no letter, and no file can hold it")
    return document


def _has_half_a_pair(document: Any) -> bool:
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


class _KeyTwice(Exception):
    """An object has a key twice."""


def _unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(items)
    if len(found) != len(items):
        keys = [key for key, _ in items]
        raise _KeyTwice(join("", next(key for key in keys if keys.count(key) > 1)))
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"the number {text[:20]}... has {len(text)} digits")
    return int(text)


_STRICT = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole
)
"""Made once: a pod's start waits for a configuration to be read."""


def is_deep(value: Any) -> bool:
    """Tell whether a decoded document is nested more than MAX_DEPTH levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return True


def at(document: Any, path: str, kind: type[T], default: T | None = None) -> T:
    """Return what an API server's object has at a path of keys, such as `metadata.uid`. null counts as absent.

    Raises Unavailable if that is of another type, or absent where there is no default.
    """
    value, seen = document, ""
    for key in path.split("."):
        if value is None:
            break
        value, seen = _typed(value, seen, dict).get(key), join(seen, key)
    return default if value is None and default is not None else _typed(value, seen, kind)


def objects_at(document: Any, path: str) -> list[dict[str, Any]]:
    """Return the objects of a list in an API server's object; none if it is absent. Raises Unavailable as `at`."""
    found = at(document, path, list, [])
    return [_typed(each, f"{path}[{number}]", dict) for number, each in enumerate(found)]


def _typed(value: Any, path: str, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise Unavailable(
            f"the API server's answer is not as Kubernetes defines it: {path or 'it'} must be {_WORDS[kind]},"
            f" is {shown(value)}"
        )
    return value


def join(path: str, key: str | int) -> str:
    """Extend a path by a key or an index."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    text = shortened(key if key.isprintable() else ascii(key))
    return f"{path}.{text}" if path else text


def unicast_mac(text: str) -> str | None:
    """Return a unicast MAC address in the usual spelling, or None. Dashes and Cisco's dots are read as Go does."""
    text = text.lower()
    if re.fullmatch(r"[0-9a-f]{2}(-[0-9a-f]{2}){5}", text):
        text = text.replace("-", ":")
    elif re.fullmatch(r"[0-9a-f]{4}(\.[0-9a-f]{4}){2}", text):
        digits = text.replace(".", "")
        text = ":".join(digits[i : i + 2] for i in range(0, 12, 2))
    if not _MAC.fullmatch(text) or int(text[:2], 16) & 1 or text == "00:00:00:00:00:00":
        return None
    return text


def shown(value: Any) -> str:
    """Write a value for an error, without secrets."""
    return shortened(repr(masked(value)))


def shortened(text: str) -> str:
    """Cut a text that is too long for an error."""
    return text if len(text) <= 80 else f"{text[:77]}..."
