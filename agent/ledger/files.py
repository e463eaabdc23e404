"""The folder of the books: one agent at a time has it, and a file that is no sound database is set aside there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from agent.errors import LedgerError, LedgerInUse
from agent.ledger import schema
from agent.model.printable import one_line

NAME = "agent.lock"
NEXT = "agent.next"
"""The lock of the agent that waits for the other one."""
MAX_HOLDER = 200
PARTS = ("", "-wal", "-shm")
"""What SQLite keeps of one database, by suffix."""
_SIGNS = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PRIMARY = 0xFF
"""Of an extended result code (sqlite.org/rescode.html)."""


def claim(folder: Path, holder: str = "", name: str = NAME) -> int:
    """Make the state folder this process's alone, until the descriptor is closed. `holder` says who that is.

    A second agent would take what the first has half done for the remains of a crash, and undo it.
    Raises LedgerInUse, and LedgerError if the folder cannot be used.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = f" ({found})" if (found := holder_of(folder)) else ""
            raise LedgerInUse(f"{folder} is in use by another agent{who}") from error
        except OSError as error:
            raise LedgerError(f"{folder} cannot be used: {error.strerror}: mount a writable folder there") from error
        with contextlib.suppress(OSError):  # on a full disk nobody is named
            os.ftruncate(lock, 0)
            os.pwrite(lock, holder.encode()[:MAX_HOLDER], 0)
        stack.pop_all()
        return lock


def holder_of(folder: Path) -> str:
    """Return what the agent that has the folder, or had it last, says of itself; empty if that is not known."""
    try:
        with (folder / NAME).open("rb") as file:
            return one_line(file.read(MAX_HOLDER).decode(errors="replace"))
    except OSError:
        return ""


def is_claimed(folder: Path, name: str = NAME) -> bool:
    """Tell whether an agent works with the books of this folder, or with NEXT waits for them, without disturbing it."""
    try:
        lock = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


class Damaged(sqlite3.DatabaseError):
    """A check has found the content to be unsound."""


def is_damage(error: BaseException | None) -> bool:
    """Tell whether an error means that the content is damaged, and not, say, that the disk is full."""
    return isinstance(error, Damaged) or (
        isinstance(error, sqlite3.DatabaseError) and getattr(error, "sqlite_errorcode", 0) & _PRIMARY in _SIGNS
    )


def check(db: sqlite3.Connection) -> None:
    """Look through an open database. Raises Damaged, and sqlite3.Error."""
    if (state := db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
        raise Damaged(state)


@contextlib.contextmanager
def checked(path: Path) -> Iterator[sqlite3.Connection]:
    """Look through a file that others of this process have open, whose memory of it hides damage, and read it then.

    Raises Damaged, also for one that is gone, and sqlite3.Error.
    """
    if not path.exists():
        raise Damaged("the file is gone")
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        db.row_factory = sqlite3.Row
        check(db)
        if schema.version_of(db) == 0:
            raise Damaged("the file is empty")
        yield db


def set_aside(path: Path, now: float) -> Path:
    """Move a damaged file away, with what SQLite keeps beside it. Returns where it is now. Raises OSError."""
    aside = path.with_name(f"{path.name}.damaged-{int(now)}")
    for suffix in PARTS:  # without its log the file could look sound, and be older
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


def copies(path: Path) -> tuple[Path, ...]:
    """List the damaged files that were set aside, and are still there."""
    found = path.parent.glob(f"{path.name}.damaged-*")
    return tuple(sorted(each for each in found if not each.name.endswith(PARTS[1:])))
