"""Values of a document as messages show them, and what helps where YAML understood another than was meant."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from agent.config.template import misplaced
from agent.model.printable import MASK, is_secret, masked_text

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
