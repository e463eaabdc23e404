"""JSON from outside, decoded within bounds and read field by field, each error with its path."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agent.errors import RequestInvalid, Unavailable
from agent.model.allocation import is_place
from agent.model.device import is_pci_address
from agent.model.printable import masked
from agent.model.unit_id import UnitId

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
"""The C scanner and encoder of Python's json give up at about a thousand; no configuration needs a tenth of this."""
MAX_DIGITS = 400
_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}")
_GUID = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){7}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a letter beyond the basic plane, as JSON may spell it."""
T = TypeVar("T")
_WORDS: Mapping[type, str] = {str: "a text", int: "a whole number", dict: "an object", list: "a list"}
_EMPTY_GUIDS = ("00:00:00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff:ff:ff")


Check = Callable[[Any], bool]
"""Tells whether a value is as it should be."""


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
    doubled: list[tuple[dict[str, Any], str]] = []
    try:
        written = text.decode("utf-8")
        if written.startswith("\ufeff"):
            raise ValueError("Unexpected UTF-8 BOM: leave it out")
        try:
            document = _STRICT.decode(written)
        except _KeyTwice:
            document = _decoder(functools.partial(_merged, doubled)).decode(written)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise NotJson(f"{what} is not JSON: {error}") from error
    if is_deep(text, document):
        raise NotJson(f"{what} is nested more than {MAX_DEPTH} levels deep")
    if doubled:
        holder, key = doubled[0]
        raise NotJson(f"{_path_of(document, holder, key)} is in {what} twice: leave one")
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
        raise _KeyTwice
    return found


def _merged(doubled: list[tuple[dict[str, Any], str]], items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Let the last of equal keys win, and note the first that is there twice: its path is known at the end only."""
    found = dict(items)
    if len(found) != len(items):
        keys = [key for key, _ in items]
        doubled.append((found, next(key for key in keys if keys.count(key) > 1)))
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


def _decoder(pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]]) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=pairs, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole
    )


_STRICT = _decoder(_unique)
"""Made once: a pod's start waits for a configuration to be read."""


def is_deep(text: bytes, document: Any) -> bool:
    """Tell whether a document, decoded from this text, is nested more than MAX_DEPTH levels deep."""
    if text.count(b"{") + text.count(b"[") <= MAX_DEPTH:
        return False
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [inner for value in level for inner in _inside(value).values() if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list) else {}


def _path_of(document: Any, holder: object, key: str) -> str:
    waiting: list[tuple[str, Any]] = [("", document)]
    while waiting:
        path, value = waiting.pop()
        if value is holder:
            return join(path, key)
        waiting += [(join(path, k), inner) for k, inner in _inside(value).items()]
    return key


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


class Fields:
    """Typed access to one JSON object. None stands for an absent key: Go writes null for both.

    With `fold` keys are matched as Go's encoding/json does: in any case, the last one that is not
    null wins.
    """

    def __init__(
        self,
        document: Any,
        path: str = "",
        *,
        what: str = "the network configuration",
        fold: bool = False,
        problems: list[str] | None = None,
    ):
        """With `problems` all that is wrong is noted there; else the first of it is raised."""
        self.path = path
        self.problems = problems
        if not isinstance(document, dict):
            raise RequestInvalid(f"{path or what} must be an object, is {shown(document)}")
        self.fold = fold
        self.given: dict[str, str] = {_folded(key): key for key in document} if fold else {}
        """Folded key → the key as it came, for errors."""
        self.document: dict[str, Any] = (
            {_folded(key): value for key, value in document.items() if value is not None} if fold else document
        )
        self.asked: set[str] = set()

    def refuse(self, text: str) -> None:
        """Note what is wrong where all of it is asked for, else raise RequestInvalid."""
        if self.problems is None:
            raise RequestInvalid(text)
        self.problems.append(text)

    def take(self, key: str, ok: Check, want: str) -> Any:
        """Return a value that is as it should be, or None. Refuses another, with its path."""
        self.asked.add(key)
        value = self.document.get(_folded(key) if self.fold else key)
        if value is not None and not ok(value):
            self.refuse(f"{join(self.path, key)} must be {want}, is {shown(value)}")
            return None
        return value

    def inside(self, key: str) -> Fields:
        """Read an object within this one; an absent one is empty."""
        return Fields(self.mapping(key) or {}, join(self.path, key), fold=self.fold, problems=self.problems)

    def has_any(self, keys: tuple[str, ...]) -> bool:
        """Tell whether any of these keys is given. All of them count as asked for."""
        self.asked.update(keys)
        return not self.document.keys().isdisjoint(map(_folded, keys) if self.fold else keys)

    def text(self, key: str, default: str, ok: Callable[[str], object], want: str) -> str:
        """Read a text that is as it should be; an empty one counts as none."""
        return self.take(key, _text_that(ok), want) or default

    def whole(self, key: str, low: int, high: int) -> int | None:
        def is_within(value: Any) -> bool:
            return type(value) is int and low <= value <= high

        value: int | None = self.take(key, is_within, f"a whole number from {low} to {high}")
        return value

    def mapping(self, key: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None = self.take(key, is_object, "an object")
        return value

    def flag(self, key: str) -> bool | None:
        value: bool | None = self.take(key, _is_flag, "true or false")
        return value

    def switch(self, key: str) -> bool | None:
        value = self.take(key, _is_switch, '"on" or "off"')
        return None if value in (None, "") else value in (True, "on")

    def go_switch(self, key: str) -> bool | None:
        """Read a switch as the Go plugins do: any text but "on" is off."""
        value = self.take(key, _is_go_switch, '"on" or "off"')
        return None if value in (None, "") else value in (True, "on")

    def word(self, key: str, words: tuple[str, ...]) -> str | None:
        value = self.take(key, ("", *words).__contains__, " or ".join(words))
        return value or None

    def mac(self, key: str) -> str | None:
        value = self.text(key, "", unicast_mac, "a unicast MAC address such as 02:00:00:00:00:01")
        return unicast_mac(value) if value else None

    def guid(self, key: str) -> str | None:
        value = self.text(key, "", _is_guid, "an InfiniBand GUID such as 02:00:00:00:00:00:00:01")
        return value.lower() if value else None

    def address(self, key: str) -> str | None:
        value = self.text(key, "", _is_address, "a PCI address such as 0000:3b:02.1")
        return value.lower() if value else None

    def device(self, key: str, *, shares: bool = False) -> str | None:
        """Read a device as kubelet knows it: its PCI address, or the slot that it was chosen for.

        With `shares` it may also be an adapter of which the pod has a share.
        """
        want = "a PCI address such as 0000:3b:02.1, or a slot such as slot-rdma:vf-0-3"
        value = self.text(key, "", _is_device_or_share if shares else is_device, want)
        return (value if UnitId.parse(value).is_slot else value.lower()) or None

    def unasked(self) -> tuple[str, ...]:
        """List the keys that nobody asked for, as they came."""
        if self.fold:
            asked = {_folded(key) for key in self.asked}
            return tuple(key for folded, key in self.given.items() if folded not in asked)
        return tuple(key for key in self.document if key not in self.asked)


def _text_that(ok: Callable[[str], object]) -> Check:
    """Make a check for a text that is empty, or that `ok` takes."""

    def is_it(value: Any) -> bool:
        return isinstance(value, str) and (value == "" or bool(ok(value)))

    return is_it


def is_text(value: Any) -> bool:
    """Tell whether a value is a text, an empty one too."""
    return isinstance(value, str)


def is_list(value: Any) -> bool:
    """Tell whether a value is a list."""
    return isinstance(value, list)


def is_object(value: Any) -> bool:
    """Tell whether a value is a JSON object."""
    return isinstance(value, dict)


def is_device(text: str) -> bool:
    """Tell whether a text names a device by its PCI address, by a slot, or by a place of a claim's devices."""
    return _is_address(text) or UnitId.parse(text).is_slot or is_place(text)


def _is_device_or_share(text: str) -> bool:
    return is_device(text) or UnitId.parse(text).is_share


def _is_address(text: str) -> bool:
    return is_pci_address(text.lower())


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool) or value in ("", "on", "off")


def _is_go_switch(value: Any) -> bool:
    return isinstance(value, bool | str)


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


def _is_guid(text: str) -> bool:
    text = text.lower()
    return bool(_GUID.fullmatch(text)) and text not in _EMPTY_GUIDS


def _folded(key: str) -> str:
    folded = key.casefold()  # maps the long s and the Kelvin sign to letters, as Go's folding does
    return folded if len(folded) == len(key) else key


def shown(value: Any) -> str:
    """Write a value for an error, without secrets."""
    return shortened(repr(masked(value)))


def shortened(text: str) -> str:
    """Cut a text that is too long for an error."""
    return text if len(text) <= 80 else f"{text[:77]}..."
