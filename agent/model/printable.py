"""Text from outside as a terminal may show it: it ends no line, so that it forges no row, and gives no orders. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def one_line(text: str) -> str:
    """Spell out whatever is no letter, as in Python: a pod may have it in the name of an interface, a plugin in an
    error."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def joined(lines: Iterable[str]) -> str:
    """Make one text of lines, each of which stays one."""
    return "\n".join(map(one_line, lines))
