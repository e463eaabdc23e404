"""Rows that the database does not hold yet, in a file that one write call puts them into.

A pod's start waits for the row of its device, and SQLite takes a third of a millisecond for it after a
pause; one write into room that is there already takes a tenth of that. The database follows while the
kernel moves the device. What the process has written survives its death; what a power cut may tear is
told by a checksum.

Each row has a place of its own, of two halves that are written in turn: a newer word never stands in
the way of the older one, whatever is killed while it is written.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

SUFFIX = "-journal-rows"
PLACES = 64
HALF_BYTES = 8192
_PLACE_BYTES = 2 * HALF_BYTES
FILE_BYTES = PLACES * _PLACE_BYTES
_HEADER = struct.Struct("<IIQ")
"""Length and CRC-32 of the JSON that follows, and a number that grows with each word about any row."""
_NOTHING = _HEADER.pack(0, 0, 0)

log = logging.getLogger(__name__)


def path_of(ledger: Path) -> Path:
    """Tell where the rows of a ledger file stand."""
    return ledger.with_name(ledger.name + SUFFIX)


def read(path: Path) -> dict[int, dict[str, Any]]:
    """Read the rows, by their key. A file that is not there has none. Raises OSError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    found: dict[int, tuple[int, dict[str, Any]]] = {}
    for start in range(0, min(len(content), FILE_BYTES), HALF_BYTES):
        word = _word(content[start : start + HALF_BYTES])
        if word is not None:
            number, key, document = word
            if key not in found or found[key][0] < number:
                found[key] = number, document
    return {key: document for key, (_, document) in sorted(found.items())}


def _word(half: bytes) -> tuple[int, int, dict[str, Any]] | None:
    if len(half) < _HEADER.size:
        return None
    length, checksum, number = _HEADER.unpack_from(half)
    text = half[_HEADER.size : _HEADER.size + length]
    if length == 0 or len(text) != length or zlib.crc32(text) != checksum:
        return None
    key, document = json.loads(text)
    return number, key, document


@dataclass(frozen=True, slots=True)
class Word:
    """What is to be said of one row, ready to be written."""

    key: int
    text: bytes
    checksum: int

    @classmethod
    def of(cls, key: int, document: str) -> Self:
        """Say a JSON object of a row."""
        text = f"[{key}, {document}]".encode()
        return cls(key, text, zlib.crc32(text))


class Journal:
    """The file, open. `put` and `clear` may be called on any thread."""

    def __init__(self, path: Path) -> None:
        """Open an empty file, with all its room on the disk. Raises OSError."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._file, 0, FILE_BYTES)
        except BaseException:
            os.close(self._file)
            raise
        self._guard = threading.Lock()
        self._free = list(range(PLACES))
        self._places: dict[int, int] = {}
        """Key → its place."""
        self._words: dict[int, int] = {}
        """Key → how many words its place has had."""
        self._number = 0

    def put(self, word: Word) -> bool:
        """Write a row in place of what was said of the same key.

        False if there is no room for it. Raises OSError.
        """
        key, text = word.key, word.text
        if len(text) > HALF_BYTES - _HEADER.size:
            return False
        with self._guard:
            if key not in self._places:
                if not self._free:
                    return False
                self._places[key], self._words[key] = self._free.pop(), 0
            self._number += 1
            offset = self._places[key] * _PLACE_BYTES + self._words[key] % 2 * HALF_BYTES
            try:
                self._write(_HEADER.pack(len(text), word.checksum, self._number) + text, offset)
            except OSError:
                if not self._words[key]:  # nobody will clear what was never said
                    self._free.append(self._places.pop(key))
                    del self._words[key]
                raise
            self._words[key] += 1
        return True

    def clear(self, key: int) -> None:
        """Forget a row. Raises OSError; the row may be there still then."""
        with self._guard:
            if key not in self._places:
                return
            start = self._places[key] * _PLACE_BYTES
            last = (self._words[key] - 1) % 2
            # The older half first: it must not be the one that is left.
            for half in (1 - last, last)[2 - min(self._words[key], 2) :]:
                os.pwrite(self._file, _NOTHING, start + half * HALF_BYTES)
            self._free.append(self._places.pop(key))
            del self._words[key]

    def _write(self, word: bytes, offset: int) -> None:
        if os.pwrite(self._file, word, offset) != len(word):  # no file system keeps its promise of room for certain
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
