"""The status document as bytes, made anew only when something changed.

A page that looks every two seconds costs a comparison while nothing happens. What is given is never older than
the question, yet a crowd that asks at once shares one document. Who has the newest already is told so.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

PIECE = 64
"""So many items of a list are written at once: the encoder holds up all other threads while it writes, and a pod's
start may be among them."""
COMPRESSION = 1
"""A 1,024-VF document shrinks to a tenth with the fastest, in a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Served:
    """One state of the document."""

    tag: str
    """Entity tag (RFC 9110), with its quotes: the same document has the same one, in any agent."""
    plain: bytes
    compressed: bytes


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=str)


class CachedStatus:
    """Gives the newest document. Any thread may ask; one of them makes it."""

    def __init__(self, version: Callable[[], Hashable], build: Callable[[], Any]) -> None:
        """`version` is cheap and differs whenever `build` would give something else. Both may raise AgentError."""
        self._version = version
        self._build = build
        self._guard = threading.Lock()
        self._made: Served | None = None
        self._seen: Hashable = None
        self._looks = itertools.count(1)
        self._looked = 0
        """Number of the last look that ended; one that began after a question answers it."""

    def get(self) -> Served:
        """Return the document of now."""
        asked = next(self._looks)
        with self._guard:
            if self._made is None or self._looked < asked:
                look = next(self._looks)
                version = self._version()  # before the document: what changes meanwhile is seen the next time
                if self._made is None or version != self._seen:
                    self._made, self._seen = served(self._build()), version
                self._looked = look
            return self._made


def served(document: Any) -> Served:
    """Write a document as bytes, plain and compressed."""
    plain = "".join(_pieces(document)).encode() + b"\n"
    tag = hashlib.sha256(plain).hexdigest()[:32]
    return Served(f'"{tag}"', plain, gzip.compress(plain, COMPRESSION, mtime=0))


def _pieces(value: Any) -> Iterator[str]:
    """Write a value as JSON, in pieces of which each is small."""
    if isinstance(value, dict) and value:
        before = "{"
        for key, inner in value.items():
            yield f"{before}{_ENCODER.encode(str(key))}:"
            yield from _pieces(inner) if isinstance(inner, dict) else _items(inner)
            before = ","
        yield "}"
    else:
        yield from _items(value)


def _items(value: Any) -> Iterator[str]:
    if not isinstance(value, list | tuple) or len(value) <= PIECE:
        yield _ENCODER.encode(value)
        return
    before = "["
    for start in range(0, len(value), PIECE):
        yield before + _ENCODER.encode(value[start : start + PIECE])[1:-1]
        before = ","
    yield "]"
