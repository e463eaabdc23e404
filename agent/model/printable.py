"""Text as people may be shown it. Pure.

Text from outside ends no line of a terminal, so that it forges no row, and gives no orders. Values whose key says that
they are secrets, and passwords in addresses, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "[not shown]"
_NAME = re.compile(
    r"token|passw|passphrase|secret|authori[sz]ation|credential|(?:private|api|access|auth|account|encryption)[-_]?key"
    r"|(?:^|[-_])(?:pass|pwd|psk)$",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(://[^/\s:@]*:)[^/\s]+@")
"""The password of `https://user:password@host`."""


def one_line(text: str) -> str:
    """Spell out whatever is no letter, as in Python: a pod may have it in the name of an interface, a plugin in an
    error."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def joined(lines: Iterable[str]) -> str:
    """Make one text of lines, each of which stays one."""
    return "\n".join(map(one_line, lines))


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


def unknown(word: str, known: Iterable[str], what: str = "key") -> str:
    """Say that a word is not known, which one was probably meant, and which are known."""
    import difflib  # only where something is wrong: a pod's start would wait for it

    names = sorted(known)
    plain = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), plain, 1, 0.7)
    meant = f" (did you mean {plain[near[0]]!r}?)" if near else ""
    return f"is not a known {what}{meant}; known are: {', '.join(names)}"
