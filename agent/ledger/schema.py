"""The file's format: tables for a new file, the steps that bring an older one up to date.

A step is one transaction together with the version number it leads to, so a file is always of one
version, whenever the process or the power goes.
"""

from __future__ import annotations

import importlib.resources
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from agent.errors import LedgerError

SCHEMA_VERSION = 9
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
