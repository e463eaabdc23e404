"""Reads the configuration file, with every problem listed at once, and no secret shown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from agent.config.compat import SRIOV_PREFIX, decode, read_shared, read_sriov
from agent.config.contradictions import contradictions
from agent.config.removed_keys import without_gone
from agent.config.section import read
from agent.config.template import IN_QUOTES, touches_template
from agent.config.values import MAX_RESCAN_SECONDS, Config
from agent.errors import ConfigError
from agent.model.device import LinkLayer
from agent.model.printable import is_secret, masked, masked_text

MAX_CONFIG_BYTES = 1 << 20
USUAL_KEYS = ("config.yaml", "config.json", "config.yml")


class Shape(Enum):
    OWN = "nodefabric"
    SRIOV = "sriov-network-device-plugin"
    SHARED = "k8s-rdma-shared-dev-plugin"


_MARKS = {
    "resourcelist": Shape.SRIOV,
    "configlist": Shape.SHARED,
    "periodicupdateinterval": Shape.SHARED,
    "mode": Shape.SHARED,
}
# Not read from there: what the values leave out is the chart's to fill in.
_OF_CHART = (
    "these are values of the chart: check what it makes of them, as"
    " helm template daemonset/chart --values FILE --show-only templates/config.yaml prints it"
)
_OF_KUBERNETES = (
    "this is an object of Kubernetes: name the agent's configuration, which begins with `resources:`, or the ConfigMap"
    " that holds it"
)


@dataclass(frozen=True, slots=True)
class Flags:
    """What the flags of another project's device plugin say besides its configuration."""

    sriov_prefix: str = SRIOV_PREFIX
    use_cdi: bool = False


def load(path: Path, flags: Flags | None = None) -> Config:
    """Read a configuration file, ours or another project's. Raises ConfigError with all that is wrong in it."""
    return parse(read_file(path), str(path), flags)


def load_legible(path: Path) -> tuple[Config, ConfigError | None]:
    """Read what is right of a configuration file, with the error: a running agent may have refused that version.

    Where it is wrong it has its defaults. Raises ConfigError if there is no such file.
    """
    text, source = read_file(path), str(path)
    try:
        config, problems = _read(text, source, Flags())
    except ConfigError as error:
        return Config(source=source), error
    return config, ConfigError(source, problems) if problems else None


def read_file(path: Path) -> bytes:
    """Read a file of configuration. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(str(path), [f"is larger than {MAX_CONFIG_BYTES} bytes"])
    return text


def parse(text: str | bytes, source: str, flags: Flags | None = None) -> Config:
    """Read configuration text, ours or another project's. Raises ConfigError with all that is wrong in it."""
    config, problems = _read(text, source, flags or Flags())
    if problems:
        raise ConfigError(source, problems)
    return config


def _read(text: str | bytes, source: str, flags: Flags) -> tuple[Config, list[str]]:
    """Read what is right, with all that is wrong in it. Raises ConfigError for what cannot be read at all."""
    shape, document = read_any(text, source)
    if shape is Shape.OWN:
        return read_config(document, source)
    problems: list[str] = []
    warnings: list[str] = []
    interval = None
    if shape is Shape.SRIOV:
        resources = read_sriov(document, problems, warnings, prefix=flags.sriov_prefix, use_cdi=flags.use_cdi)
    else:
        resources, interval = read_shared(document, problems, warnings, use_cdi=flags.use_cdi)
    config = Config(resources=resources, source=source, warnings=tuple(warnings))
    if interval is not None:
        config = replace(config, rescan_seconds=float(min(interval, MAX_RESCAN_SECONDS)))
    return config, problems


def describe(config: Config) -> str:
    """Return the configuration in effect, defaults included, as one line of JSON, without secrets.

    Of resources only what says something, for most of a selector is empty, and networks as they are written.
    """
    document = asdict(config)
    document["resources"] = [_telling(item) for item in document["resources"]]
    document["networks"] = [{"name": network.name, **network.keys} for network in config.networks]

    def plain(value: Any) -> Any:
        if isinstance(value, frozenset):
            return sorted(value)
        return value.value if isinstance(value, LinkLayer) else str(value)

    return json.dumps(masked(document), default=plain)


def _telling(value: Any) -> Any:
    """Leave out what is empty, at any depth."""
    if isinstance(value, dict):
        shorter = {key: _telling(inner) for key, inner in value.items()}
        return {key: inner for key, inner in shorter.items() if inner not in (None, "", (), [], {}, False)}
    return [_telling(inner) for inner in value] if isinstance(value, list | tuple) else value


def read_config(document: Any, source: str) -> tuple[Config, list[str]]:
    """Read a document of our own shape as far as it is right, with all that is wrong in it."""
    left, warnings = without_gone({} if document is None else document)
    found, problems = read(_CONFIG, left)
    config = replace(found, source=source, warnings=warnings)
    if problems:
        return config, [*map(str, problems)]
    return config, [f"{path}: {text}" for path, text in contradictions(config)]


_CONFIG = TypeAdapter(Config)


def read_any(text: str | bytes, source: str) -> tuple[Shape, Any]:
    """Read text of any shape: the shape, and the document as that shape's reader wants it. Raises ConfigError."""
    spelled = text.decode("utf-8-sig", "replace") if isinstance(text, bytes) else text
    if spelled.lstrip().startswith("{") and any(f'"{mark}"' in spelled.lower() for mark in _MARKS):
        found = decode(spelled, source)
        shape = _shape(found)
        if shape is not Shape.OWN:  # networks of our own have a `mode`, too
            return shape, found
    document = read_document(text, source)
    if isinstance(document, dict) and document.get("kind") == "ConfigMap" and "resources" not in document:
        return read_any(_only_text(document, source), source)
    if isinstance(document, dict) and isinstance(document.get("config"), dict):
        raise ConfigError(source, [_OF_CHART])
    if isinstance(document, dict) and {"apiVersion", "kind"} <= document.keys() and "resources" not in document:
        raise ConfigError(source, [_OF_KUBERNETES])
    return Shape.OWN, document


def _shape(document: Any) -> Shape:
    keys = [key.lower() for key in document] if isinstance(document, dict) else []
    return next((_MARKS[key] for key in keys if key in _MARKS), Shape.OWN)


def _only_text(document: dict[str, Any], source: str) -> str:
    data = document.get("data")
    texts = {key: text for key, text in data.items() if isinstance(text, str)} if isinstance(data, dict) else {}
    for key in USUAL_KEYS:
        if key in texts:
            return texts[key]
    if len(texts) != 1:
        names = ", ".join(map(str, texts)) or "nothing"
        raise ConfigError(
            source, [f"data: must hold one configuration, holds {names}: save the one you mean as a file"]
        )
    return next(iter(texts.values()))


def read_document(text: str | bytes, source: str) -> Any:
    """Read YAML text in which no key stands twice in a mapping. Raises ConfigError."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 -- a SafeLoader that also refuses repeated keys
    except Exception as error:  # for a bad tag or number PyYAML raises whatever int(), date() or a lookup raise
        raise ConfigError(source, [f"is not YAML: {_said(error)}"]) from error


def _said(error: Exception) -> str:
    """Return what PyYAML says, which shows the line that it stumbled over, unless that line may hold a secret."""
    if "found character '\\t'" in str(error) and (mark := getattr(error, "problem_mark", None)) is not None:
        return f"line {mark.line + 1}, column {mark.column + 1} has a tab, which YAML does not allow there: use spaces"
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
