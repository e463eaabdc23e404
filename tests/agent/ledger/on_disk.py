"""What a ledger's folder holds at a moment, its journal apart from its database."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from agent.ledger import journal
from agent.model.allocation import Attachment


def path_of(folder: Path) -> Path:
    """Say where the journal is."""
    return journal.path_of(folder / "ledger.db")


@contextlib.contextmanager
def busy(folder: Path) -> Iterator[None]:
    """Keep the database from being written."""
    with contextlib.closing(sqlite3.connect(folder / "ledger.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def in_database(folder: Path) -> list[tuple[str, str]]:
    """Read devices and states from the database alone."""
    with contextlib.closing(sqlite3.connect(folder / "ledger.db")) as other:
        return list(other.execute("SELECT device, state FROM attachments ORDER BY device"))


def die(folder: Path, grave: Path) -> None:
    """Copy what is on the disk at this moment, as a death leaves it."""
    grave.mkdir()
    for file in folder.glob("ledger.db*"):
        (grave / file.name).write_bytes(file.read_bytes())


def until_empty(folder: Path) -> None:
    """Wait until the database has followed the journal."""
    deadline = time.monotonic() + 30
    while journal.read(path_of(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def seen(rows: tuple[Attachment, ...]) -> list[tuple[str, str]]:
    """Name devices and states of rows."""
    return [(row.device, row.state.value) for row in rows]
