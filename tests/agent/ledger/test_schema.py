"""Files of earlier versions: brought up to date as a whole or not at all, and nothing in them is lost."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import LedgerError
from agent.ledger import SCHEMA_VERSION, Ledger, schema
from agent.model.allocation import AttachmentState, NetnsId, Owner, PodRef, Quarantine, VfSettings
from agent.model.vf_identity import Rail
from tests.agent.ledger.format_1 import write_format_1
from tests.node import VF, open_books


def tables(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Tell what the tables and indices of a file look like."""
    with closing(sqlite3.connect(path)) as db:
        names = [n for (n,) in db.execute("SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'")]
        found: dict[str, list[tuple[object, ...]]] = {}
        for name in sorted(names):
            found[name] = list(db.execute(f"PRAGMA table_info({name})")) or list(
                db.execute(f"PRAGMA index_xinfo({name})")
            )
            found[f"{name} strict"] = list(db.execute("SELECT strict FROM pragma_table_list WHERE name = ?", (name,)))
        return found


def test_a_file_of_format_1_is_read_by_this_version_with_all_that_is_in_it(tmp_path: Path) -> None:
    write_format_1(tmp_path / "ledger.db")
    with open_books(tmp_path) as books:
        assert not books.is_new
        assert books.recovered_from is None
        (grant,) = books.grants()
        assert (grant.unit_id, grant.device, grant.pod) == ("u1", VF, PodRef("default", "p"))
        (row,) = books.attachments()
        assert row.owner == Owner("c1", "net1", PodRef("default", "p", "uid"), NetnsId(4, 99))
        assert (row.attachment_id, row.state, row.undo.mode) == (7, AttachmentState.ATTACHED, "vf")
        assert row.undo.settings == VfSettings(vlan=0, vlan_qos=0, vlan_proto="802.1q")
        assert books.quarantines() == (Quarantine("0000:3b:00.3", "clean-up failed: x", 12.0, ""),)
        (lease,) = books.owed_leases()
        assert (lease.lease_id, lease.container_id, lease.tried_at, lease.problem) == (3, "c0", 0.0, "")
        assert books.known_devices() == ()
        books.finish_detach(row)
        books.note_lease_problem(3, "hangs")


def test_a_file_brought_up_to_date_looks_like_a_new_one(tmp_path: Path) -> None:
    write_format_1(tmp_path / "ledger.db")
    (tmp_path / "new").mkdir()
    for folder in (tmp_path, tmp_path / "new"):
        with open_books(folder):
            pass
    assert tables(tmp_path / "ledger.db") == tables(tmp_path / "new/ledger.db")


def test_rails_of_before_planes_keep_their_numbers_as_those_that_resources_take(tmp_path: Path) -> None:
    write_format_1(tmp_path / "ledger.db")
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        for version in range(1, 8):
            db.executescript(schema.STEPS[version])
        db.execute("INSERT INTO rails VALUES (3, '0000:3b:00.0', 'card', 'ens1', 0), (5, '0000:5d:00.0', '', '', 1)")
        db.execute("PRAGMA user_version = 8")
    with open_books(tmp_path) as books:
        assert books.rails() == (
            Rail(3, "0000:3b:00.0", "card", "ens1", is_named=False, plane=0, is_settled=True),
            Rail(5, "0000:5d:00.0", "", "", is_named=True, plane=0, is_settled=True),
        )
        planes = tuple(replace(books.rails()[0], plane=plane, device=f"0000:3b:00.{plane}") for plane in (0, 1))
        books.keep_rails(planes)
    with open_books(tmp_path) as books:
        assert books.rails() == planes


def test_every_earlier_format_has_a_step_to_the_next() -> None:
    assert list(schema.STEPS) == list(range(1, SCHEMA_VERSION))


def test_a_step_that_fails_changes_nothing_and_is_taken_later(tmp_path: Path) -> None:
    write_format_1(tmp_path / "ledger.db")
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        db.execute("CREATE TABLE known_devices (x)")  # in the way of what the step does last
    before = tables(tmp_path / "ledger.db")
    with pytest.raises(LedgerError, match="known_devices already exists"):
        Ledger.open(tmp_path / "ledger.db", "boot")
    assert tables(tmp_path / "ledger.db") == before
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        db.execute("DROP TABLE known_devices")
    with open_books(tmp_path) as books:
        assert len(books.attachments()) == 1
