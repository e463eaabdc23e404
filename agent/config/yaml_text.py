"""YAML as plain values, in which no key stands twice, with errors that show no secret."""

from __future__ import annotations

from typing import Any

import yaml

from agent.config.template import IN_QUOTES, touches_template
from agent.errors import ConfigError
from agent.model.printable import is_secret, masked_text


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
