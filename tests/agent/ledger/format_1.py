"""A ledger file of the first format, with something in each table."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.node import VF

FORMAT_1 = (Path(__file__).parent / "format-1.sql").read_text()
UNDO = {
    "netdev": "ens1f0v0",
    "mac": "02:00:00:00:01:00",
    "mtu": 1500,
    "up": False,
    "pf_netdev": "ens1f0",
    "vf_index": 0,
    "settings": {"vlan": 0, "vlan_qos": 0, "vlan_proto": "802.1q"},
}


def write_format_1(path: Path) -> None:
    """Write a file as the first version did, with something in each table."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(FORMAT_1)
        db.execute("INSERT INTO grants VALUES ('u1', 'rdma/vf', ?, 10.0, 'default', 'p', '')", (VF,))
        db.execute(
            "INSERT INTO attachments VALUES (7, 'c1', 'net1', 'default', 'p', 'uid', 4, 99, '/run/netns/x', 'net1', ?,"
            " 'rdma/vf', 'attached', ?, '{\"name\": \"n\", \"network\": null}', '{}', 'boot', 11.0)",
            (VF, json.dumps(UNDO)),
        )
        db.execute("INSERT INTO quarantine VALUES ('0000:3b:00.3', 'clean-up failed: x', 12.0)")
        db.execute("INSERT INTO owed_leases VALUES (3, 'c0', 'net1', '/x', '{\"network\": null}', 13.0)")
        db.execute("PRAGMA user_version = 1")
