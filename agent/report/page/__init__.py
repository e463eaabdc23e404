"""The status page: files that a browser gets as they lie here. They ask for nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Scripts, styles and data come from the agent alone, and no text can become markup."""


@dataclass(frozen=True, slots=True)
class File:
    """What a browser gets for one address."""

    content_type: str
    body: bytes


def load() -> Mapping[str, File]:
    """Read the page's files: address → file. They are part of the installed package."""
    found = {}
    for file in resources.files(__package__).iterdir():
        if (content_type := _TYPES.get(file.name.rpartition(".")[2])) is not None:
            address = "/" if file.name == "index.html" else f"/page/{file.name}"
            found[address] = File(content_type, file.read_bytes())
    return found
