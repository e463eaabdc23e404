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

SCHEMA_VERSION = 10
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
        # Units, slots and the results of claims become rows of one table. What a slot was bound to comes with it, maybe
        # in an earlier boot: by now its device may be a claim's, and the slot another pod's. A slot's grant may name a
        # device for longer than that.
        9: """
        CREATE TABLE holds (
            key            TEXT PRIMARY KEY,
            resource_name  TEXT NOT NULL,
            since          REAL NOT NULL,
            pod_namespace  TEXT,
            pod_name       TEXT,
            pod_uid        TEXT,
            spec           TEXT,
            kind           TEXT NOT NULL,
            exclusive      INTEGER NOT NULL,
            container      TEXT NOT NULL,
            container_id   TEXT NOT NULL,
            cni_ifname     TEXT NOT NULL,
            bound_at       REAL NOT NULL,
            boot_id        TEXT NOT NULL,
            claim_uid      TEXT NOT NULL,
            request        TEXT NOT NULL,
            pool           TEXT NOT NULL,
            device_name    TEXT NOT NULL,
            share_id       TEXT NOT NULL,
            admin          INTEGER NOT NULL,
            identity       TEXT NOT NULL,
            network        TEXT NOT NULL,
            ifname         TEXT NOT NULL,
            shares         INTEGER NOT NULL
        ) STRICT;
        CREATE TABLE hold_devices (
            key        TEXT NOT NULL,
            position   INTEGER NOT NULL,
            device     TEXT NOT NULL,
            exclusive  INTEGER NOT NULL,
            PRIMARY KEY (key, position)
        ) STRICT;
        CREATE UNIQUE INDEX hold_devices_exclusive ON hold_devices (device) WHERE exclusive;
        INSERT INTO holds SELECT g.unit_id, g.resource_name, g.granted_at, g.pod_namespace, g.pod_name, g.pod_uid,
            CASE WHEN g.spec IS NULL THEN NULL ELSE json_object('kind', json_extract(g.spec, '$.kind'),
                'edits', json(coalesce(json_extract(g.spec, '$.edits'), '{}')),
                'added', json(coalesce(json_extract(g.spec, '$.told'), '{}')),
                'beside', json(coalesce(json_extract(g.spec, '$.beside'), '[]')),
                'nodes', json(coalesce(json_extract(g.spec, '$.nodes'), '{}'))) END,
            '', 0, '', '', '', 0, '', '', '', '', '', '', 0, '', '{}', '', 1
            FROM grants g WHERE g.unit_id NOT IN (SELECT unit_id FROM bindings) ORDER BY g.granted_at, g.unit_id;
        INSERT INTO hold_devices SELECT unit_id, 0, device, 0 FROM grants
            WHERE device <> '' AND unit_id NOT GLOB 'slot-*';
        INSERT INTO hold_devices SELECT g.unit_id, o.key + 1, o.value, 0 FROM grants g, json_each(g.others) o;
        INSERT INTO holds SELECT b.unit_id, CASE b.resource_name WHEN '' THEN coalesce(g.resource_name, '')
                ELSE b.resource_name END, coalesce(g.granted_at, b.since),
            iif(g.device <> b.device, g.pod_namespace, iif(b.pod_name = '', NULL, b.pod_namespace)),
            iif(g.device <> b.device, g.pod_name, nullif(b.pod_name, '')),
            iif(g.device <> b.device, g.pod_uid, iif(b.pod_name = '', NULL, b.pod_uid)),
            json_object('kind', b.kind, 'edits', json(b.edits), 'added', json('{}'), 'beside', json('[]'),
                'nodes', json('{}')),
            b.kind, 0, b.container, b.container_id, b.cni_ifname, b.since, b.boot_id,
            '', '', '', '', '', 0, '', '{}', '', 1
            FROM bindings b LEFT JOIN grants g ON g.unit_id = b.unit_id ORDER BY b.since, b.unit_id;
        INSERT INTO hold_devices SELECT unit_id, 0, device, 1 FROM bindings
            WHERE device NOT IN (SELECT device FROM claim_devices WHERE exclusive AND NOT admin);
        CREATE TEMP TABLE named AS SELECT d.*, d.rowid AS number,
            iif(d.cdi_name = '', d.claim_uid || '-' || d.rowid, d.cdi_name) AS key,
            iif(d.edits = '{}', json_object('env', json_array('NODEFABRIC_CLAIM=' || c.namespace || '/' || c.name)),
                json(d.edits)) AS said
            FROM claim_devices d JOIN claims c ON c.claim_uid = d.claim_uid;
        INSERT INTO holds SELECT key, resource_name, 0, NULL, NULL, NULL,
            iif(cdi_name = '', NULL, json_object('kind', 'claim', 'edits', json(said), 'added', json('{}'),
                'beside', json('[]'), 'nodes', json('{}'))),
            kind, exclusive, '', '', '', 0, '', claim_uid, request, pool, device_name, share_id, admin, identity,
            network, ifname, shares FROM named ORDER BY number;
        INSERT INTO hold_devices SELECT key, 0, device, exclusive AND NOT admin FROM named;
        DROP TABLE named;
        DROP TABLE grants;
        DROP TABLE bindings;
        DROP TABLE claim_devices;
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
