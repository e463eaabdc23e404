"""Another process reads the books: while the agent writes, while none runs, and whatever version wrote them."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from agent.errors import LedgerError
from agent.ledger import SCHEMA_VERSION, Ledger
from agent.ledger.database import Books, read_books, read_rails
from agent.model.vf_identity import Rail
from tests import versions
from tests.node import VF, granted, open_books


def test_reading_never_meets_half_a_change(books: Ledger) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            books.grant(granted("rdma/vf", {"u1": VF, "u2": VF}))
            books.release(["u1", "u2"])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        counts = {len(read_books(books.path).holds) for _ in range(50)}
    finally:
        stop.set()
        writer.join()
    assert counts <= {0, 2}


def test_reading_writes_nothing(tmp_path: Path) -> None:
    versions.unpack(versions.FIRST, tmp_path)
    before = (tmp_path / "ledger.db").read_bytes()
    assert len(read_books(tmp_path / "ledger.db").attachments) == 3
    assert (tmp_path / "ledger.db").read_bytes() == before


def test_the_numbers_of_rails_are_read_and_no_books_are_told(tmp_path: Path) -> None:
    rails = (Rail(0, "0000:3b:00.0", "card", "ens1"), Rail(2, "0000:5d:00.0", "", ""))
    with open_books(tmp_path) as books:
        books.keep_rails(rails)
        assert read_rails(books.path) == rails
    with pytest.raises(LedgerError, match=r"/none/ledger\.db is not there"):
        read_rails(tmp_path / "none/ledger.db")


def test_no_file_is_empty_books(tmp_path: Path) -> None:
    assert read_books(tmp_path / "ledger.db") == Books()


def test_a_file_that_is_damaged_or_newer_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(LedgerError, match="file is not a database: run this as root"):
        read_books(path)
    path.unlink()
    with open_books(tmp_path):
        pass
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(LedgerError, match="written by a newer nodefabric"):
        read_books(path)
