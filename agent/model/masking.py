"""What must not be shown: values whose key says that they are secrets, and passwords in addresses. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "[not shown]"
_NAME = re.compile(
    r"token|passw|passphrase|secret|authori[sz]ation|credential|(?:private|api|access|auth|account|encryption)[-_]?key"
    r"|(?:^|[-_])(?:pass|pwd|psk)$",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(://[^/\s:@]*:)[^/\s]+@")
"""The password of `https://user:password@host`."""


def is_secret(name: str) -> bool:
    """Tell whether a key, or a line of text, looks as if a secret followed."""
    return _NAME.search(name) is not None


def masked(value: Any) -> Any:
    """Copy a tree of mappings and lists without what must not be shown. Keys stay, so that one sees what was said."""
    if isinstance(value, Mapping):
        return {k: MASK if is_secret(str(k)) and inner else masked(inner) for k, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner) for inner in value]
    return masked_text(value) if isinstance(value, str) else value


def masked_text(text: str) -> str:
    """Leave out the passwords in addresses of a text."""
    return _IN_ADDRESS.sub(rf"\1{MASK}@", text) if "://" in text else text
