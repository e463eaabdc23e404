"""The file's format: tables for a new file, and what an older one had in place of some of them.

A file is brought up to date in one transaction together with its version number, so it is always of one version,
whenever the process or the power goes. Tables that it lacks are made, and columns that its tables lack are added with
their defaults: a new column with a default needs nothing here but another number.
"""

from __future__ import annotations

import importlib.resources
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from agent.errors import LedgerError

SCHEMA_VERSION = 10
FORMER = """
CREATE TABLE IF NOT EXISTS grants (spec TEXT, others TEXT NOT NULL DEFAULT '[]');
CREATE TABLE IF NOT EXISTS bindings (unit_id, resource_name, kind, device, container, container_id, cni_ifname,
    pod_namespace, pod_name, pod_uid, edits, boot_id, since);
CREATE TABLE IF NOT EXISTS claim_devices (claim_uid, request, pool, device_name, share_id, resource_name, kind, device,
    identity, exclusive, admin, network, ifname, cdi_name, edits, shares INTEGER NOT NULL DEFAULT 1);
"""
"""Tables of units, slots and results of claims, before they were rows of `holds`: as far as early formats lack them."""
TO_HOLDS = (
    # What a slot was bound to comes with it, maybe in an earlier boot: by now its device may be a claim's, and the slot
    # another pod's. A slot's grant may name a device for longer than that.
    """
    INSERT INTO holds SELECT g.unit_id, g.resource_name, g.granted_at, g.pod_namespace, g.pod_name, g.pod_uid,
        CASE WHEN g.spec IS NULL THEN NULL ELSE json_object('kind', json_extract(g.spec, '$.kind'),
            'edits', json(coalesce(json_extract(g.spec, '$.edits'), '{}')),
            'added', json(coalesce(json_extract(g.spec, '$.told'), '{}')),
            'beside', json(coalesce(json_extract(g.spec, '$.beside'), '[]')),
            'nodes', json(coalesce(json_extract(g.spec, '$.nodes'), '{}'))) END,
        '', 0, '', '', '', 0, '', '', '', '', '', '', 0, '', '{}', '', 1
        FROM grants g WHERE g.unit_id NOT IN (SELECT unit_id FROM bindings) ORDER BY g.granted_at, g.unit_id
    """,
    """
    INSERT INTO hold_devices SELECT unit_id, 0, device, 0 FROM grants
        WHERE device <> '' AND unit_id NOT GLOB 'slot-*'
    """,
    "INSERT INTO hold_devices SELECT g.unit_id, o.key + 1, o.value, 0 FROM grants g, json_each(g.others) o",
    """
    INSERT INTO holds SELECT b.unit_id, CASE b.resource_name WHEN '' THEN coalesce(g.resource_name, '')
            ELSE b.resource_name END, coalesce(g.granted_at, b.since),
        iif(g.device <> b.device, g.pod_namespace, iif(b.pod_name = '', NULL, b.pod_namespace)),
        iif(g.device <> b.device, g.pod_name, nullif(b.pod_name, '')),
        iif(g.device <> b.device, g.pod_uid, iif(b.pod_name = '', NULL, b.pod_uid)),
        json_object('kind', b.kind, 'edits', json(b.edits), 'beside', json('[]')),
        b.kind, 0, b.container, b.container_id, b.cni_ifname, b.since, b.boot_id,
        '', '', '', '', '', 0, '', '{}', '', 1
        FROM bindings b LEFT JOIN grants g ON g.unit_id = b.unit_id ORDER BY b.since, b.unit_id
    """,
    """
    INSERT INTO hold_devices SELECT unit_id, 0, device, 1 FROM bindings
        WHERE device NOT IN (SELECT device FROM claim_devices WHERE exclusive AND NOT admin)
    """,
    """
    CREATE TEMP TABLE named AS SELECT d.*, d.rowid AS number,
        iif(d.cdi_name = '', d.claim_uid || '-' || d.rowid, d.cdi_name) AS key,
        iif(d.edits = '{}', json_object('env', json_array('NODEFABRIC_CLAIM=' || c.namespace || '/' || c.name)),
            json(d.edits)) AS said
        FROM claim_devices d JOIN claims c ON c.claim_uid = d.claim_uid
    """,
    """
    INSERT INTO holds SELECT key, resource_name, 0, NULL, NULL, NULL,
        iif(cdi_name = '', NULL, json_object('kind', 'claim', 'edits', json(said), 'beside', json('[]'))),
        kind, exclusive, '', '', '', 0, '', claim_uid, request, pool, device_name, share_id, admin, identity,
        network, ifname, shares FROM named ORDER BY number
    """,
    "INSERT INTO hold_devices SELECT key, 0, device, exclusive AND NOT admin FROM named",
    "DROP TABLE named",
    "DROP TABLE grants",
    "DROP TABLE bindings",
    "DROP TABLE claim_devices",
    "DROP INDEX IF EXISTS attachments_owner",
)
RAILS_BEFORE_PLANES = range(6, 9)
"""Formats whose rails had no planes."""
TO_PLANES = (
    # Numbers that a node has are not to move, whether or not a resource takes the adapter now.
    "INSERT INTO rails SELECT number, 0, device, identity, netdev, is_named, 1 FROM rails_before_planes",
    "DROP TABLE rails_before_planes",
)


def bring_up_to_date(db: sqlite3.Connection, path: Path) -> None:
    """Give the file the current format, whatever it has. Raises LedgerError for a newer one, and sqlite3.Error."""
    version = version_of(db)
    if version > SCHEMA_VERSION:
        raise LedgerError(
            f"{path} was written by a newer nodefabric (format {version}, this one knows"
            f" {SCHEMA_VERSION}): install that version again, or move the file away with no pod on the node"
        )
    if version == SCHEMA_VERSION:
        return
    tables = importlib.resources.files("agent.ledger").joinpath("schema.sql").read_text()
    try:
        if version == 0:
            db.executescript(f"BEGIN IMMEDIATE; {tables}")
        else:
            _convert(db, version, FORMER + tables)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    except sqlite3.Error:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def version_of(db: sqlite3.Connection) -> int:
    """Return the file's format; 0 for an empty file."""
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    return version


def _convert(db: sqlite3.Connection, version: int, tables: str) -> None:
    """Begin a transaction, and have `tables` hold what older ones say. Raises sqlite3.Error."""
    has_rails = version in RAILS_BEFORE_PLANES
    renamed = "ALTER TABLE rails RENAME TO rails_before_planes;" if has_rails else ""
    db.executescript(f"BEGIN IMMEDIATE; {renamed} {tables}")
    for statement in (*_lacking(db, tables), *TO_HOLDS, *(TO_PLANES if has_rails else ())):
        db.execute(statement)


def _lacking(db: sqlite3.Connection, tables: str) -> Iterator[str]:
    """Add the columns that a file's tables lack."""
    query = "SELECT t.name, c.name, c.type, c.dflt_value FROM pragma_table_list t, pragma_table_info(t.name) c"
    known = {(table, column) for table, column, *_ in db.execute(query)}
    with closing(sqlite3.connect(":memory:")) as new:
        new.executescript(tables)
        for table, column, kind, default in new.execute(query):
            if (table, column) not in known:
                needed = f"NOT NULL DEFAULT {default}" if default is not None else ""
                yield f"ALTER TABLE {table} ADD COLUMN {column} {kind} {needed}"
