"""The file itself: opened, set aside if damaged, read and written, one change at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from agent.errors import LedgerError
from agent.ledger import rows, schema
from agent.ledger.late import LateRow

JOURNAL_BYTES = 4 << 20
"""The write-ahead log is cut to this size when it begins anew; it may have grown while a reader was slow."""

MODE = 0o600

log = logging.getLogger(__name__)
T = TypeVar("T")


class Database:
    """An open ledger file. What is in it is told by the books that build on this."""

    def __init__(self, path: Path, boot_id: str, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self.boot_id = boot_id
        self.recovered_from: Path | None = None
        """Where a damaged file was set aside at opening; None if there was none."""
        self.is_new = False
        """Whether there was nothing in the file at opening: what happened before is not known."""
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._db: sqlite3.Connection
        self._reader: sqlite3.Connection
        self._connections = contextlib.ExitStack()
        self._is_open = True
        self._is_durable: bool | None = None
        """What `PRAGMA synchronous` was set to last: to set it once more is a statement that a pod waits for."""
        self._is_stuck = False
        """The connection is in a transaction that it cannot end."""

    @classmethod
    def open(cls, path: Path, boot_id: str, clock: Callable[[], float] = time.time) -> Self:
        """Open or create the ledger file.

        A damaged file is set aside (`recovered_from` names it) and an empty one begun: kubelet's
        PodResources and the kernel still know the rest. Raises LedgerError for a file written by a
        newer version, and for a folder or disk that cannot be written.
        """
        ledger = cls(path, boot_id, clock)
        try:
            with ledger._translated():
                ledger._connect()
                ledger._connections.callback(lambda: ledger._db.close())  # whichever it is by then
                ledger._reader = ledger._open_reader()
                ledger._connections.callback(ledger._reader.close)
                ledger._load()
        except BaseException:
            ledger.close()  # whoever tries again each second must not gather threads and descriptors
            raise
        return ledger

    def close(self) -> None:
        """Finish what is under way and close the file. Whoever comes later gets a LedgerError."""
        with self._writing, self._reading:
            if self._is_open:
                self._is_open = False
                self._connections.close()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change, before anybody can make the next. It must not block or raise."""
        self._listeners.append(listener)

    def probe(self) -> None:
        """Find out whether a change can be written now. Changes nothing; raises LedgerError.

        Nobody waits for the disk: a full one refuses the write itself.
        """
        with self._writing, self._usable():
            self._reopen_if_stuck()  # or nobody would: while this fails no unit is offered, and nothing written
            version = schema.version_of(self._db)
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._is_durable = False
            self._db.execute(f"PRAGMA user_version = {version}")

    def _load(self) -> None:
        """Read what is kept in memory. Each book adds its own."""

    def _check_open(self) -> None:
        if not self._is_open:
            raise LedgerError(f"{self.path} is closed: the agent is ending")

    def _read(self, sql: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        with self._reading, self._usable():
            return self._reader.execute(sql, values).fetchall()

    def _write(self, work: Callable[[], T], durable: bool = True, then: Callable[[T], None] | None = None) -> T:
        """Do `work` in a transaction of its own, and `then` with its result once it holds."""
        with self._writing, self._usable():
            self._reopen_if_stuck()
            late = self._late_rows()
            durable = durable or any(one.durable for one in late)
            if durable is not self._is_durable:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._is_durable = durable
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for one in late:
                    rows.put_attachment(self._db, one.row.attachment_id, rows.said_of(one.row))
                value = work()
                self._db.execute("COMMIT")
            except BaseException:
                self._refused(late)
                self._roll_back()
                raise
            self._settled(late)
            if then is not None:
                then(value)
            for listener in self._listeners:
                listener()
            return value

    def _roll_back(self) -> None:
        """End the transaction. A connection that cannot (an I/O error) would refuse every later one, too."""
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error as error:
            log.error("%s: a change that failed could not be taken back, the file is opened anew: %s", self.path, error)
            self._is_stuck = True
            self._reopen_if_stuck()

    def _reopen_if_stuck(self) -> None:
        """Open the file anew after a transaction that would not end. SQLite takes it back then, as after a crash."""
        if self._is_stuck:
            self._db.close()
            self._db = self._open_file()
            self._is_durable, self._is_stuck = True, False

    def _late_rows(self) -> tuple[LateRow, ...]:
        """List rows that must be written before anything else."""
        return ()

    def _settled(self, late: tuple[LateRow, ...]) -> None:
        """Take note that these are written."""

    def _refused(self, late: tuple[LateRow, ...]) -> None:
        """Take note that these could not be written."""

    def _usable(self) -> _Translated:
        self._check_open()
        return self._translated()

    def _translated(self) -> _Translated:
        return _Translated(self.path)

    def _connect(self) -> None:
        try:
            self._db = self._open_file()
        except sqlite3.OperationalError:
            raise  # the folder or the disk, not the content
        except sqlite3.DatabaseError as error:
            aside = self.path.with_name(f"{self.path.name}.damaged-{int(self._clock())}")
            log.error("the ledger is damaged; it is set aside and begun anew", extra={"path": str(aside)})
            log.error("damage: %s", error)
            for suffix in ("", "-wal", "-shm"):  # without its log the file could look sound, and be older
                part = self.path.with_name(self.path.name + suffix)
                if part.exists():
                    part.rename(aside.with_name(aside.name + suffix))
            self.recovered_from = aside
            self._db = self._open_file()

    def _open_file(self) -> sqlite3.Connection:
        self._keep_private()
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")
            if (state := db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(state)
            self.is_new = schema.version_of(db) == 0
            schema.bring_up_to_date(db, self.path)
        except BaseException:
            db.close()
            raise
        return db

    def _keep_private(self) -> None:
        """Let nobody else read it: configurations hold what IPAM plugins log in with, and kubelet may make the folder.

        An open file is never opened here once more: to close it again would take SQLite its locks (fcntl(2)).
        """
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE))
        except FileExistsError:
            for suffix in ("", "-wal", "-shm"):
                part = f"{self.path}{suffix}"
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_IMODE(os.stat(part).st_mode) != MODE:
                        os.chmod(part, MODE)

    def _open_reader(self) -> sqlite3.Connection:
        reader = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        reader.row_factory = sqlite3.Row
        reader.execute("PRAGMA query_only = ON")
        return reader


class _Translated:
    """Raises LedgerError for what the file or its disk refuses. No generator: a pod's start goes through here twice."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, sqlite3.Error | OSError):
            raise LedgerError(f"{self._path}: {error}: free space or repair the disk; nothing was changed") from error
