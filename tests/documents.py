"""Parts of Markdown documents."""

from __future__ import annotations

import re
from pathlib import Path


def headings(path: Path) -> set[str]:
    """List the anchors of a document as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def blocks(path: Path, language: str) -> list[str]:
    """Return what the fenced blocks of a language hold."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", path.read_text(), re.MULTILINE | re.DOTALL)


def first_cells(path: Path, head: str) -> list[str]:
    """Return the first column of the table whose head begins so."""
    rows = path.read_text().partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [row.split("|")[1].strip() for row in rows]
