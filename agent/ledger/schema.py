"""The file's format: tables for a new file, the steps that bring an older one up to date, and an earlier journal.

A step is one transaction together with the version number it leads to, so a file is always of one
version, whenever the process or the power goes.

An earlier version kept rows in a journal beside the database, which had not taken them yet when it died.
"""

from __future__ import annotations

import importlib.resources
import json
import logging
import sqlite3
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent.errors import LedgerError
from agent.ledger import rows

SCHEMA_VERSION = 9
JOURNAL_SUFFIX = "-journal-rows"
_PLACE_BYTES = 8192
_HEADER = struct.Struct("<IIQ")
"""Length and CRC-32 of the JSON that follows, and a number that grows with each place that is written."""

STEPS: Mapping[int, str] = MappingProxyType(
    {
        1: """
        CREATE TABLE IF NOT EXISTS owed_leases (  -- the first versions had none
            lease_id      INTEGER PRIMARY KEY AUTOINCREMENT,
            container_id  TEXT NOT NULL,
            ifname        TEXT NOT NULL,
            netns_path    TEXT NOT NULL,
            request       TEXT NOT NULL,
            since         REAL NOT NULL
        ) STRICT;
        ALTER TABLE quarantine ADD COLUMN boot_id TEXT NOT NULL DEFAULT '';
        ALTER TABLE owed_leases ADD COLUMN tried_at REAL NOT NULL DEFAULT 0;
        ALTER TABLE owed_leases ADD COLUMN problem TEXT NOT NULL DEFAULT '';
        CREATE TABLE known_devices (
            device    TEXT PRIMARY KEY,
            identity  TEXT NOT NULL,
            netdev    TEXT NOT NULL,
            mac       TEXT NOT NULL,
            mtu       INTEGER NOT NULL,
            boot_id   TEXT NOT NULL,
            seen      REAL NOT NULL
        ) STRICT;
        """,
        2: """
        CREATE TABLE bindings (
            unit_id        TEXT PRIMARY KEY,
            resource_name  TEXT NOT NULL,
            kind           TEXT NOT NULL,
            device         TEXT NOT NULL UNIQUE,
            container      TEXT NOT NULL,
            container_id   TEXT NOT NULL,
            cni_ifname     TEXT NOT NULL,
            pod_namespace  TEXT NOT NULL,
            pod_name       TEXT NOT NULL,
            pod_uid        TEXT NOT NULL,
            edits          TEXT NOT NULL,
            boot_id        TEXT NOT NULL,
            since          REAL NOT NULL
        ) STRICT;
        DROP INDEX attachments_owner;
        """,
        3: """
        ALTER TABLE attachments ADD COLUMN claim_uid TEXT NOT NULL DEFAULT '';
        CREATE TABLE claims (
            claim_uid  TEXT PRIMARY KEY,
            namespace  TEXT NOT NULL,
            name       TEXT NOT NULL,
            pods       TEXT NOT NULL,
            only_pod   TEXT NOT NULL,
            state      TEXT NOT NULL CHECK (state IN ('preparing', 'prepared', 'unpreparing')),
            boot_id    TEXT NOT NULL,
            since      REAL NOT NULL
        ) STRICT;
        CREATE TABLE claim_devices (
            claim_uid      TEXT NOT NULL,
            request        TEXT NOT NULL,
            pool           TEXT NOT NULL,
            device_name    TEXT NOT NULL,
            share_id       TEXT NOT NULL,
            resource_name  TEXT NOT NULL,
            kind           TEXT NOT NULL,
            device         TEXT NOT NULL,
            identity       TEXT NOT NULL,
            exclusive      INTEGER NOT NULL,
            admin          INTEGER NOT NULL,
            network        TEXT NOT NULL,
            ifname         TEXT NOT NULL,
            cdi_name       TEXT NOT NULL,
            edits          TEXT NOT NULL,
            PRIMARY KEY (claim_uid, request, device_name, share_id)
        ) STRICT;
        CREATE UNIQUE INDEX claim_devices_exclusive ON claim_devices (device) WHERE exclusive AND NOT admin;
        """,
        4: """
        ALTER TABLE claim_devices ADD COLUMN shares INTEGER NOT NULL DEFAULT 1;
        """,
        5: """
        CREATE TABLE rails (
            number    INTEGER PRIMARY KEY,
            device    TEXT NOT NULL,
            identity  TEXT NOT NULL,
            netdev    TEXT NOT NULL,
            is_named  INTEGER NOT NULL
        ) STRICT;
        """,
        6: """
        ALTER TABLE grants ADD COLUMN spec TEXT;
        """,
        7: """
        ALTER TABLE grants ADD COLUMN others TEXT NOT NULL DEFAULT '[]';
        """,
        # Numbers that a node has are not to move, whether or not a resource takes the adapter now.
        8: """
        ALTER TABLE rails RENAME TO rails_before_planes;
        CREATE TABLE rails (
            number    INTEGER NOT NULL,
            plane     INTEGER NOT NULL,
            device    TEXT NOT NULL,
            identity  TEXT NOT NULL,
            netdev    TEXT NOT NULL,
            is_named  INTEGER NOT NULL,
            is_settled  INTEGER NOT NULL,
            PRIMARY KEY (number, plane)
        ) STRICT;
        INSERT INTO rails SELECT number, 0, device, identity, netdev, is_named, 1 FROM rails_before_planes;
        DROP TABLE rails_before_planes;
        """,
    }
)
"""Format → what makes the next one of it."""

log = logging.getLogger(__name__)


def bring_up_to_date(db: sqlite3.Connection, path: Path) -> None:
    """Give the file the current format, whatever it has. Raises LedgerError for a newer one, and sqlite3.Error."""
    version = version_of(db)
    if version > SCHEMA_VERSION:
        raise LedgerError(
            f"{path} was written by a newer nodefabric (format {version}, this one knows"
            f" {SCHEMA_VERSION}): install that version again, or move the file away with no pod on the node"
        )
    if version == 0:
        schema = importlib.resources.files("agent.ledger").joinpath("schema.sql").read_text()
        _step(db, schema, SCHEMA_VERSION)
    for known in range(version or SCHEMA_VERSION, SCHEMA_VERSION):
        _step(db, STEPS[known], known + 1)


def version_of(db: sqlite3.Connection) -> int:
    """Return the file's format; 0 for an empty file."""
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    return version


def _step(db: sqlite3.Connection, script: str, version: int) -> None:
    try:
        db.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {version}; COMMIT;")
    except sqlite3.Error:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def journal_of(ledger: Path) -> Path:
    """Tell where the rows of a ledger file stand."""
    return ledger.with_name(ledger.name + JOURNAL_SUFFIX)


def read_journal(path: Path) -> dict[int, dict[str, Any]]:
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


def put_journal(db: sqlite3.Connection, said: Mapping[int, Mapping[str, Any]]) -> None:
    """Write them into the database, in place of what it has of the same attachments. Raises sqlite3.Error."""
    for row_id, told in said.items():
        columns = {"attachment_id": row_id, **told}
        for name in ("undo", "request", "result"):
            columns[name] = json.dumps(told[name]) if told[name] is not None else None
        update = "UPDATE attachments SET state = :state, result = :result, since = :since"
        if db.execute(f"{update} WHERE attachment_id = :attachment_id", columns).rowcount:
            continue
        try:
            rows.insert(db, "attachments", [columns])
        except sqlite3.IntegrityError as error:
            log.error("the attachment of %s beside the ledger is passed over: %s", told["device"], error)
