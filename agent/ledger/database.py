"""The file itself: opened, set aside if damaged, read and written, one change at a time.

A file that turns out to be damaged while it is open is set aside, too, and written anew from memory, which has all
grants, attachments, bindings and claims; the rest as it can still be read, or else as it was at the last look.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from agent.errors import LedgerError
from agent.ledger import files, schema

JOURNAL_BYTES = 4 << 20
"""The write-ahead log is cut to this size when it begins anew; it may have grown while a reader was slow."""

MODE = 0o600
MOST_REWRITES = 3
"""A file that is damaged more often is on a disk that will go on doing so."""

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
        self._is_loaded = False
        self._rewrites = 0
        """How often the file was written anew from memory."""

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
                ledger._connections.callback(ledger._close_writer)
                ledger._reader = ledger._open_reader()
                ledger._connections.callback(ledger._close_reader)
                ledger._load()
                ledger._is_loaded = True
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

    def _close_writer(self) -> None:
        self._db.close()  # whichever it is by then

    def _close_reader(self) -> None:
        self._reader.close()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change, before anybody can make the next. It must not block or raise."""
        self._listeners.append(listener)

    def probe(self) -> None:
        """Find out whether the file is sound, and a change can be written now. Changes nothing; raises LedgerError.

        Nobody waits for the disk: a full one refuses the write itself.
        """
        self._mended(self._probe_content)
        self._mended(self._probe_writing)

    def damaged_copies(self) -> tuple[Path, ...]:
        """List the damaged files that were set aside, now or earlier, and that nobody has removed yet."""
        return files.copies(self.path)

    def _probe_content(self) -> None:
        with self._usable(), files.checked(self.path) as db:
            self._remember(db)

    def _probe_writing(self) -> None:
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

    def _remember(self, db: sqlite3.Connection) -> None:
        """Keep in memory, from a sound file, what `_restore` may need and is not there anyway."""

    def _restore(self, db: sqlite3.Connection) -> None:
        """Write what is kept in memory, and what can still be read, into an empty file. Each book adds its own."""

    def _read(self, sql: str, values: Mapping[str, Any] | None = None) -> list[sqlite3.Row]:
        return self._mended(partial(self._read_once, sql, values))

    def _read_once(self, sql: str, values: Mapping[str, Any] | None) -> list[sqlite3.Row]:
        with self._reading, self._usable():
            return self._reader.execute(sql, values or {}).fetchall()

    def _write(self, work: Callable[[], T], durable: bool = True, then: Callable[[T], None] | None = None) -> T:
        """Do `work` in a transaction of its own, and `then` with its result once it holds."""
        return self._mended(partial(self._write_once, work, durable, then))

    def _mended(self, work: Callable[[], T]) -> T:
        """Do `work`, and once more with the file written anew from memory if that turns out to be damaged."""
        rewrites = self._rewrites
        try:
            return work()
        except LedgerError as error:
            if not (self._is_loaded and files.is_damage(error.__cause__)):
                raise
            self._write_anew(rewrites, str(error.__cause__))
        return work()

    def _write_anew(self, rewrites: int, why: str) -> None:
        """Set the file aside, and put one in its place with all that is in memory. Raises LedgerError.

        The new one is complete before anything else is touched. `rewrites` is the number of them when the damage was
        met: another thread may have been faster.
        """
        with self._writing, self._reading, self._usable():
            if self._rewrites != rewrites:
                return
            if rewrites >= MOST_REWRITES:
                raise LedgerError(f"{self.path} is damaged again and again, now: {why}: see to its disk")
            fresh = self._made_from_memory()
            self._is_stuck = True  # until the new one is open
            self._db.close()
            self._reader.close()
            aside = files.set_aside(self.path, self._clock())
            fresh.rename(self.path)
            self._reopen_if_stuck()
            self._reader = self._open_reader()
            self._rewrites += 1
            log.error("%s was damaged (%s): it is set aside as %s, and written anew", self.path, why, aside)

    def _made_from_memory(self) -> Path:
        fresh = self.path.with_name(f"{self.path.name}.new")
        for suffix in files.PARTS:  # of an attempt that failed
            fresh.with_name(fresh.name + suffix).unlink(missing_ok=True)
        with contextlib.closing(self._open_file(fresh)) as db:
            db.execute("BEGIN IMMEDIATE")
            self._restore(db)
            db.execute("COMMIT")
        return fresh

    def _write_once(self, work: Callable[[], T], durable: bool, then: Callable[[T], None] | None) -> T:
        with self._writing, self._usable():
            self._reopen_if_stuck()
            if durable is not self._is_durable:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._is_durable = durable
            self._db.execute("BEGIN IMMEDIATE")
            try:
                value = work()
                self._db.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise
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
            self._db = self._open_file(self.path)
            self._is_durable, self._is_stuck = True, False

    def _usable(self) -> _Translated:
        self._check_open()
        return self._translated()

    def _translated(self) -> _Translated:
        return _Translated(self.path)

    def _connect(self) -> None:
        try:
            self._db = self._open_file(self.path)
        except sqlite3.OperationalError:
            raise  # the folder or the disk, not the content
        except sqlite3.DatabaseError as error:
            self.recovered_from = aside = files.set_aside(self.path, self._clock())
            log.error("the ledger is damaged; it is set aside and begun anew", extra={"path": str(aside)})
            log.error("damage: %s", error)
            self._db = self._open_file(self.path)

    def _open_file(self, path: Path) -> sqlite3.Connection:
        _keep_private(path)
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")
            files.check(db)
            self.is_new = schema.version_of(db) == 0
            schema.bring_up_to_date(db, path)
        except BaseException:
            db.close()
            raise
        return db

    def _open_reader(self) -> sqlite3.Connection:
        reader = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        reader.row_factory = sqlite3.Row
        reader.execute("PRAGMA query_only = ON")
        return reader


def _keep_private(path: Path) -> None:
    """Let nobody else read it: configurations hold what IPAM plugins log in with, and kubelet may make the folder.

    An open file is never opened here once more: to close it again would take SQLite its locks (fcntl(2)).
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE))
    except FileExistsError:
        for suffix in files.PARTS:
            part = f"{path}{suffix}"
            with contextlib.suppress(FileNotFoundError):
                if stat.S_IMODE(os.stat(part).st_mode) != MODE:
                    os.chmod(part, MODE)


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
