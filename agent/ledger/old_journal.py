"""Rows that an earlier version kept in a file beside the database, which had not taken them yet when it died."""

from __future__ import annotations

import json
import logging
import sqlite3
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.ledger import rows

SUFFIX = "-journal-rows"
_PLACE_BYTES = 8192
_HEADER = struct.Struct("<IIQ")
"""Length and CRC-32 of the JSON that follows, and a number that grows with each place that is written."""

log = logging.getLogger(__name__)


def path_of(ledger: Path) -> Path:
    """Tell where the rows of a ledger file stand."""
    return ledger.with_name(ledger.name + SUFFIX)


def read(path: Path) -> dict[int, dict[str, Any]]:
    """Read the newest that is said of each attachment, in columns, by its ID. Raises OSError.

    A file that is not there says nothing, nor does a place that was not written to its end.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    said = sorted(_places(content))
    return {row_id: columns for _, text in said for row_id, columns in [json.loads(text)]}


def _places(content: bytes) -> list[tuple[int, bytes]]:
    found = []
    for start in range(0, len(content) - _HEADER.size + 1, _PLACE_BYTES):
        length, checksum, number = _HEADER.unpack_from(content, start)
        text = content[start + _HEADER.size : start + min(_HEADER.size + length, _PLACE_BYTES)]
        if length == len(text) > 0 and zlib.crc32(text) == checksum:
            found.append((number, text))
    return found


def put(db: sqlite3.Connection, said: Mapping[int, Mapping[str, Any]]) -> None:
    """Write them into the database, in place of what it has of the same attachments. Raises sqlite3.Error."""
    for row_id, told in said.items():
        columns = {"attachment_id": row_id, **told}
        for name in ("undo", "request", "result"):
            columns[name] = json.dumps(told[name]) if told[name] is not None else None
        update = "UPDATE attachments SET state = :state, result = :result, since = :since"
        if db.execute(f"{update} WHERE attachment_id = :attachment_id", columns).rowcount:
            continue
        try:
            rows.insert_columns(db, columns)
        except sqlite3.IntegrityError as error:
            log.error("the attachment of %s beside the ledger is passed over: %s", told["device"], error)
