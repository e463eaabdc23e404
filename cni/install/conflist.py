"""Which network configuration a runtime takes, and how our plugin joins it. Pure.

libcni lists *.conf, *.conflist and *.json by name, and the runtime takes the first as the cluster network. In a
*.conflist our entry is put into the text behind the last plugin, and nothing else of the text is touched: taken
out again, the file is what it was, byte for byte. A *.conf names one plugin and cannot be chained: a conflist of
our own goes before it, "10-a-nodefabric.conflist" before "10-a.conf", that holds its text unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from agent.config.networks import OWN, REPLACED
from agent.errors import RequestInvalid
from cni.netconf import KINDS, SUPPORTED_VERSIONS, from_document

EXTENSIONS = (".conf", ".conflist", ".json")
ENTRY = f'{{"type": "{OWN}"}}'
WRAPPER_SUFFIX = f"-{OWN}.conflist"
_WRAPS = f"{OWN}-wraps"
"""A key that no runtime knows: it tells our wrapper from a file that only has such a name."""
_SPACE = " \t\r\n"


class ConflistInvalid(ValueError):
    """A configuration is not one that a runtime can use, or that our plugin can join. Says what is wrong."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do in the folder so that our plugin is in the network that the runtime takes."""

    network: str | None
    """The file the runtime takes, or None if there is none."""
    write: tuple[str, bytes] | None = None
    remove: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        """Tell whether nothing is left to do."""
        return self.network is not None and self.write is None and not self.remove


def candidates(names: list[str]) -> list[str]:
    """List what libcni reads, in its order: by bytes, as Go compares strings."""
    return sorted((n for n in names if n[n.rfind(".") :] in EXTENSIONS and "." in n), key=os.fsencode)


def plan(files: Mapping[str, bytes]) -> Plan:
    """Say what it takes to have our plugin in the cluster network. Raises ConflistInvalid, naming the file."""
    wrappers = [name for name in files if wrapped_file(name, files[name]) is not None]
    others = candidates([name for name in files if name not in wrappers])
    if not others:
        return Plan(None, remove=tuple(wrappers))
    head = others[0]
    try:
        if head.endswith(".conflist"):
            name, content = head, chained(files[head])
        else:
            name, content = head.rpartition(".")[0] + WRAPPER_SUFFIX, wrapped(head, files[head])
    except ConflistInvalid as error:
        raise ConflistInvalid(f"{head}: {error}") from error
    write = (name, content) if content is not None and files.get(name) != content else None
    return Plan(head, write, tuple(w for w in wrappers if w != name or head.endswith(".conflist")))


def chained(content: bytes) -> bytes | None:
    """Put our entry behind the last plugin of a conflist; None if our plugin is in it already."""
    text = _decoded(content)
    plugins = _plugins(text)
    _check_version(_object(text))
    if any(plugin.value.get("type") == OWN for plugin in plugins):
        return None
    at = plugins[-1].end
    return (text[:at] + ", " + ENTRY + text[at:]).encode()


def unchained(content: bytes, *, with_settings: bool = False) -> bytes | None:
    """Take our entries out of a conflist; None if there is none, or nothing else.

    An entry with settings is its author's, and stays but for `with_settings`.
    """
    text = _decoded(content)
    plugins = _plugins(text)
    ours = [
        number
        for number, plugin in enumerate(plugins)
        if plugin.value == json.loads(ENTRY) or (with_settings and plugin.value.get("type") == OWN)
    ]
    if not ours or len(ours) == len(plugins):
        return None
    for number in reversed(ours):
        if number > 0:
            text = text[: plugins[number - 1].end] + text[plugins[number].end :]
        else:
            plugins = _plugins(text)  # the one behind it may have been ours, too
            text = text[: plugins[0].start] + text[plugins[1].start :]
    return text.encode()


def names_us(content: bytes) -> bool:
    """Tell whether a configuration names our plugin anywhere a runtime would run it."""
    try:
        document = _object(_decoded(content))
    except ConflistInvalid:
        return False
    plugins = document.get("plugins")
    listed = [p for p in plugins if isinstance(p, dict)] if isinstance(plugins, list) else []
    return any(plugin.get("type") == OWN for plugin in (document, *listed))


def wrapped(name: str, content: bytes) -> bytes:
    """Make the conflist that stands before the single configuration `name`."""
    text = _decoded(content)
    document = _object(text)
    if not isinstance(document.get("type"), str) or not document["type"]:
        raise ConflistInvalid("it has no 'type': the runtime cannot use it")
    if not isinstance(document.get("name"), str) or not document["name"]:
        raise ConflistInvalid("it has no 'name': the runtime cannot use it")
    _check_version(document)
    head = {"cniVersion": document["cniVersion"], "name": document["name"], _WRAPS: name}
    return (json.dumps(head)[:-1] + ', "plugins": [' + text.strip(_SPACE) + ", " + ENTRY + "]}\n").encode()


def wrapped_file(name: str, content: bytes) -> str | None:
    """Return which file a wrapper of ours stands before, or None if it is none of ours."""
    if not name.endswith(WRAPPER_SUFFIX):
        return None
    try:
        wraps = _object(_decoded(content)).get(_WRAPS)
    except ConflistInvalid:
        return None
    return wraps if isinstance(wraps, str) else None


def check(content: bytes) -> None:
    """Check a conflist of one's own: a runtime can use it, and our plugin is in it. Raises ConflistInvalid."""
    text = _decoded(content)
    document = _object(text)
    if not isinstance(document.get("name"), str) or not document["name"]:
        raise ConflistInvalid("it has no 'name': give the network one")
    _check_version(document)
    plugins = [plugin.value for plugin in _plugins(text)]
    if not any(plugin.get("type") in KINDS for plugin in plugins):
        raise ConflistInvalid(f"none of its plugins has type {OWN!r}, nor one of {', '.join(REPLACED)}")
    for number, plugin in enumerate(plugins):
        if plugin.get("type") == OWN:
            _check_keys(number, {**plugin, "name": document["name"], "cniVersion": document["cniVersion"]})


@dataclass(frozen=True, slots=True)
class _Plugin:
    start: int
    end: int
    value: Mapping[str, Any]


def _check_keys(number: int, plugin: Mapping[str, Any]) -> None:
    """Say now what each pod's ADD would say. The replaced types take keys that only the runtime gives."""
    try:
        from_document(plugin)
    except RequestInvalid as error:
        raise ConflistInvalid(f"plugins[{number}]: {error}") from error


def _check_version(document: Mapping[str, Any]) -> None:
    """libcni takes a configuration without a version for 0.1.0."""
    version = document.get("cniVersion", "0.1.0")
    if version not in SUPPORTED_VERSIONS:
        raise ConflistInvalid(
            f"its cniVersion is {version!r}; every plugin of a chain is asked in that version, and nodefabric speaks"
            f" {', '.join(SUPPORTED_VERSIONS)}: change it there"
        )


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConflistInvalid(f"it is not UTF-8 (byte {error.start})") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder(parse_constant=_refuse_constant, parse_int=float).raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise ConflistInvalid(f"it is not JSON ({error}); is it being written?") from error


def _object(text: str) -> dict[str, Any]:
    value, end = _value(text, _skip(text, 0))
    if text[end:].strip(_SPACE):
        raise ConflistInvalid("something follows the JSON object")
    if not isinstance(value, dict):
        raise ConflistInvalid("it is no JSON object")
    return value


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _plugins(text: str) -> list[_Plugin]:
    """Find the plugins in the text of a conflist. Raises ConflistInvalid if there is none."""
    if not isinstance(_object(text).get("plugins"), list):
        raise ConflistInvalid("it has no list 'plugins'")
    found: list[_Plugin] = []
    at = _skip(text, 0)
    while text[at] != "}":
        key, at = _value(text, _skip(text, at + 1))
        start = _skip(text, _skip(text, at) + 1)
        _, at = _value(text, start)
        at = _skip(text, at)
        if key == "plugins":
            found = _elements(text, start)  # of a key that is there twice, the last counts
    if not found:
        raise ConflistInvalid("its list 'plugins' is empty")
    return found


def _elements(text: str, start: int) -> list[_Plugin]:
    found: list[_Plugin] = []
    at = start
    while text[at] != "]":
        begin = _skip(text, at + 1)
        if text[begin] == "]":
            break
        value, end = _value(text, begin)
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise ConflistInvalid(f"plugins[{len(found)}] has no 'type'")
        found.append(_Plugin(begin, end, value))
        at = _skip(text, end)
    return found
