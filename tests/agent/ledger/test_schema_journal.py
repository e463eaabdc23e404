"""Books of a version that kept rows in a journal beside the database.

`with-journal.tar.gz` holds what such an agent left when it was killed with SIGKILL while another process kept the
database from being written: ledger.db, its write-ahead log and the journal. Of the journal's last two words the second
halves are gone, as a power cut may leave them.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tarfile
from pathlib import Path

import pytest

from agent.errors import LedgerError
from agent.ledger import Ledger, schema
from agent.model.allocation import AttachmentState
from tests.node import POD, VF, open_books

LEFT = Path(__file__).with_name("with-journal.tar.gz")
TAKEN_OVER = [
    ("0000:3b:00.7", "attached", "c7"),  # in the database alone
    ("0000:3b:00.4", "attached", "c4"),  # attaching there
    ("0000:3b:00.2", "attaching", "c2"),
    ("0000:3b:00.3", "attached", "c3"),
    ("0000:3b:00.5", "attaching", "c5"),  # that it is attached was not written to its end
]
"""Devices, states and containers. Nothing was to be seen yet of one more, 0000:3b:00.6, when it was torn."""


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """Return a folder with what was left."""
    with tarfile.open(LEFT) as archive:
        archive.extractall(tmp_path, filter="data")
    assert schema.journal_of(tmp_path / "ledger.db").exists()
    return tmp_path


def seen(books: Ledger) -> list[tuple[str, str, str]]:
    return [(row.device, row.state.value, row.owner.container_id) for row in books.attachments()]


def change(folder: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(folder / "ledger.db", isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


def test_rows_that_only_the_journal_has_are_taken_over_once(left: Path) -> None:
    with open_books(left) as books:
        assert seen(books) == TAKEN_OVER
        waiting = books.attachment_on(VF)
        ready = books.attachment_on("0000:3b:00.4")
        assert waiting is not None
        assert ready is not None
        assert (waiting.owner.pod, waiting.undo.netdev, waiting.request["name"]) == (POD, "ens1f0v0", "net")
        assert (waiting.since, waiting.boot_id, waiting.result) == (1700000000.25, "boot", None)
        assert ready.result == {"cniVersion": "1.0.0", "interfaces": [{"name": "net1"}]}
        assert not schema.journal_of(books.path).exists()
        books.finish_detach(waiting)
    with open_books(left) as books:
        assert seen(books) == [row for row in TAKEN_OVER if row[0] != VF]
        books.finish_attach([row.attachment_id for row in books.attachments() if row.state == "attaching"], {})
        assert {row.state for row in books.attachments()} == {AttachmentState.ATTACHED}


def test_the_journal_stays_until_the_database_has_its_rows(left: Path) -> None:
    change(left, "CREATE TRIGGER refuse BEFORE UPDATE ON attachments BEGIN SELECT raise(ABORT, 'not now'); END")
    with pytest.raises(LedgerError, match="not now"):
        Ledger.open(left / "ledger.db", "boot")
    change(left, "DROP TRIGGER refuse")
    with open_books(left) as books:
        assert seen(books) == TAKEN_OVER


def test_a_row_whose_device_has_another_in_the_database_is_passed_over(
    left: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(left, f"UPDATE attachments SET device = '{VF}' WHERE container_id = 'c7'")
    with open_books(left) as books:
        assert seen(books) == [(VF, "attached", "c7"), *(row for row in TAKEN_OVER[1:] if row[0] != VF)]
    assert f"the attachment of {VF} beside the ledger is passed over: UNIQUE" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\0" * 100_000, b"\xff" * 20_000, b"short", b"\1\0\0\0" * 5000])
def test_what_is_no_journal_says_nothing_and_goes(tmp_path: Path, content: bytes) -> None:
    journal = schema.journal_of(tmp_path / "ledger.db")
    journal.write_bytes(content)
    with open_books(tmp_path) as books:
        assert books.attachments() == ()
    assert not journal.exists()
