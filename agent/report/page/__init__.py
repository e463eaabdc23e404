"""The status page: files that a browser gets as they lie here. They ask for nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

HTML = "text/html; charset=utf-8"
_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
FILES = (
    *("details.js", "dom.js", "hardware.js", "icon.svg", "keyboard.js", "lists.js", "main.js", "model.js", "page.css"),
    *("states.js", "times.js"),
)

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
    folder = resources.files(__package__)
    found = {"/": File(HTML, folder.joinpath("index.html").read_bytes())}
    for name in FILES:
        found[f"/page/{name}"] = File(_TYPES[name.rpartition(".")[2]], folder.joinpath(name).read_bytes())
    return found
