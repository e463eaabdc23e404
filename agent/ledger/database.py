"""The file itself: opened, set aside if damaged, read and written, one change at a time.

A file that turns out to be damaged while it is open stays as it is (`LedgerDamaged`): the next start sets it aside.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from agent.errors import LedgerDamaged, LedgerError, LedgerInUse
from agent.ledger import rows, schema
from agent.model.allocation import Attachment, Claim, Hold, OwedLease, Quarantine
from agent.model.printable import one_line
from agent.model.vf_identity import Rail
from agent.state import Latest

LOCK = "agent.lock"
NEXT_LOCK = "agent.next"
"""The lock of the agent that waits for the other one."""
MAX_HOLDER = 200
PARTS = ("", "-wal", "-shm")
"""What SQLite keeps of one database, by suffix."""


def lock_folder(folder: Path, holder: str = "", name: str = LOCK) -> int:
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
            who = f" ({found})" if (found := lock_holder(folder)) else ""
            raise LedgerInUse(f"{folder} is in use by another agent{who}") from error
        except OSError as error:
            raise LedgerError(f"{folder} cannot be used: {error.strerror}: mount a writable folder there") from error
        with contextlib.suppress(OSError):  # on a full disk nobody is named
            os.ftruncate(lock, 0)
            os.pwrite(lock, holder.encode()[:MAX_HOLDER], 0)
        stack.pop_all()
        return lock


def lock_holder(folder: Path) -> str:
    """Return what the agent that has the folder, or had it last, says of itself; empty if that is not known."""
    try:
        with (folder / LOCK).open("rb") as file:
            return one_line(file.read(MAX_HOLDER).decode(errors="replace"))
    except OSError:
        return ""


def is_locked(folder: Path, name: str = LOCK) -> bool:
    """Whether an agent has the books of this folder, or with NEXT_LOCK waits for them; it is not disturbed."""
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


def _connected(file: Path | str) -> sqlite3.Connection:
    """Open a file, in transactions of our own. Nothing is put into temporary files: a container may have no room."""
    db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA temp_store = MEMORY")
    return db


def _check(db: sqlite3.Connection) -> None:
    """Look through an open database. Raises sqlite3.Error, DatabaseError for damage."""
    if (state := db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(state)


def _is_damage(error: sqlite3.Error | OSError) -> bool:
    """Whether the content is damaged, and not, say, the disk full."""
    return type(error) is sqlite3.DatabaseError  # its subclasses are of other things


def _check_file(path: Path) -> None:
    """Look through a file that this process has open, whose memory of it hides damage.

    Raises sqlite3.Error, DatabaseError for one that is damaged, empty or gone.
    """
    if not path.exists():
        raise sqlite3.DatabaseError("the file is gone")
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        _check(db)
        if schema.version_of(db) == 0:
            raise sqlite3.DatabaseError("the file is empty")


def _set_aside(path: Path, now: float) -> Path:
    """Move a damaged file away, with what SQLite keeps beside it. Returns where it is now. Raises OSError.

    Of earlier ones only the newest stay: a disk that damages each new file must not fill up with them.
    """
    for old in damaged_copies_of(path)[: 1 - MAX_COPIES]:
        for suffix in PARTS:
            old.with_name(old.name + suffix).unlink(missing_ok=True)
    aside = path.with_name(f"{path.name}.damaged-{int(now)}")
    for suffix in PARTS:  # without its log the file could look sound, and be older
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


def damaged_copies_of(path: Path) -> tuple[Path, ...]:
    """List the damaged files that were set aside, and are still there."""
    found = path.parent.glob(f"{path.name}.damaged-*")
    return tuple(sorted(each for each in found if not each.name.endswith(PARTS[1:])))


JOURNAL_BYTES = 4 << 20
"""The write-ahead log is cut to this size when it begins anew; it may have grown while a reader was slow."""

MODE = 0o600
MAX_COPIES = 3
"""So many damaged files are kept."""
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
        self._holds: Mirror[str, Hold] = Mirror(attrgetter("key"), attrgetter("devices"))
        self._claims: Mirror[str, Claim] = Mirror(attrgetter("ref.uid"), lambda claim: ())
        self._attachments: Mirror[int, Attachment] = Mirror(attrgetter("attachment_id"), lambda row: (row.device,))
        self._listeners: list[Callable[[], None]] = []
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._db: sqlite3.Connection
        self._reader: sqlite3.Connection
        self._connections = contextlib.ExitStack()
        self._is_open = True
        self._is_durable: bool | None = None
        """What `PRAGMA synchronous` was set to last: to set it once more is a statement that a pod waits for."""
        self.damage: Latest[LedgerDamaged | None] = Latest(None)
        """What was found to be wrong with the open file, which only another start mends."""

    @classmethod
    def open(cls, path: Path, boot_id: str, clock: Callable[[], float] = time.time) -> Self:
        """Open or create the ledger file.

        A damaged file is set aside (`recovered_from` names it) and an empty one begun: kubelet's
        PodResources and the kernel still know the rest. Raises LedgerError for a file written by a
        newer version, and for a folder or disk that cannot be written.
        """
        ledger = cls(path, boot_id, clock)
        try:
            with _Translated(ledger.path, ledger._damaged):
                ledger._connect()
                ledger._connections.callback(ledger._db.close)
                ledger._reader = _connected(path)
                ledger._connections.callback(ledger._reader.close)
                ledger._reader.execute("PRAGMA query_only = ON")
                ledger._load()
        except BaseException:
            ledger.close()  # whoever tries again each second must not gather threads and descriptors
            raise
        return ledger

    def close(self) -> None:
        """Finish what is under way and close the file. Who writes later gets a LedgerError."""
        with self._writing, self._reading:
            if self._is_open:
                self._is_open = False
                self._connections.close()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change, before anybody can make the next. It must not block or raise."""
        self._listeners.append(listener)

    def probe(self) -> None:
        """Find out whether the file is sound, and a change can be written now. Changes nothing.

        Nobody waits for the disk: a full one refuses the write itself. Raises LedgerError, LedgerDamaged where only
        another start helps.
        """
        with self._usable():
            _check_file(self.path)
        with self._writing, self._usable():
            version = schema.version_of(self._db)
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._is_durable = False
            self._db.execute(f"PRAGMA user_version = {version}")

    def damaged_copies(self) -> tuple[Path, ...]:
        """List the damaged files that were set aside, now or earlier, and that nobody has removed yet."""
        return damaged_copies_of(self.path)

    def _load(self) -> None:
        """Read what is kept in memory. Each book adds its own."""

    def _read(self, sql: str, values: Mapping[str, Any] | None = None) -> list[sqlite3.Row]:
        with self._reading, self._usable():
            return self._reader.execute(sql, values or {}).fetchall()

    def _write(self, work: Callable[[], T], durable: bool = True, then: Callable[[T], None] | None = None) -> T:
        """Do `work` in a transaction of its own, and `then` with its result once it holds."""
        with self._writing, self._usable():
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
            self._damaged(f"{self.path}: a change could not be taken back ({error}): see to its disk")

    def _damaged(self, what: str) -> LedgerDamaged:
        """Make the error, and wake who ends the agent for it: each call would fail until then."""
        error = LedgerDamaged(what)
        self.damage.set(error)
        return error

    def _usable(self) -> _Translated:
        if not self._is_open:
            raise LedgerError(f"{self.path} is closed: the agent is ending")
        if self.damage.value is not None:
            raise LedgerDamaged(str(self.damage.value))
        return _Translated(self.path, self._damaged)

    def _connect(self) -> None:
        try:
            self._db = self._open_file(self.path)
        except sqlite3.OperationalError:
            raise  # the folder or the disk, not the content
        except sqlite3.DatabaseError as error:
            self.recovered_from = aside = _set_aside(self.path, self._clock())
            log.error("the ledger is damaged; it is set aside and begun again", extra={"path": str(aside)})
            log.error("damage: %s", error)
            self._db = self._open_file(self.path)

    def _open_file(self, path: Path) -> sqlite3.Connection:
        _keep_private(path)
        db = _connected(path)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")
            _check(db)
            self.is_new = schema.version_of(db) == 0
            schema.bring_up_to_date(db, path)
        except BaseException:
            db.close()
            raise
        return db


def _keep_private(path: Path) -> None:
    """Let nobody else read it: configurations hold what IPAM plugins log in with, and kubelet may make the folder.

    An open file is never opened here once more: to close it again would take SQLite its locks (fcntl(2)).
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE))
    except FileExistsError:
        for suffix in PARTS:
            part = f"{path}{suffix}"
            with contextlib.suppress(FileNotFoundError):
                if stat.S_IMODE(os.stat(part).st_mode) != MODE:
                    os.chmod(part, MODE)


class _Translated:
    """Raises LedgerError for what the file or its disk refuses. No generator: a pod's start goes through here twice."""

    __slots__ = ("_damaged", "_path")

    def __init__(self, path: Path, damaged: Callable[[str], LedgerDamaged]) -> None:
        self._path = path
        self._damaged = damaged

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, sqlite3.Error | OSError):
            if _is_damage(error):
                raise self._damaged(f"{self._path} is damaged: {error}: see to its disk") from error
            raise LedgerError(f"{self._path}: {error}: free space or repair the disk; nothing was changed") from error


K = TypeVar("K")
V = TypeVar("V")


class Mirror(Generic[K, V]):
    """Values by key and by device, for any thread."""

    def __init__(self, key: Callable[[V], K], devices: Callable[[V], Iterable[str]]) -> None:
        """`devices` lists those that a value is about."""
        self._key = key
        self._devices = devices
        self._guard = threading.Lock()
        self._values: dict[K, V] = {}
        self._of_device: dict[str, dict[K, V]] = {}
        self._watchers: list[Callable[[V | None, V | None], None]] = []

    def watch(self, watcher: Callable[[V | None, V | None], None]) -> None:
        """Call `watcher` with each value before and after a change (None: not there). It must not block or raise."""
        self._watchers.append(watcher)

    def put(self, values: Iterable[V]) -> None:
        """Add values, or set them in place of those with the same key."""
        with self._guard:
            for value in values:
                key = self._key(value)
                former = self._drop(key, keep_place=True)
                self._values[key] = value
                for device in self._devices(value):
                    self._of_device.setdefault(device, {})[key] = value
                for watcher in self._watchers:
                    watcher(former, value)

    def remove(self, keys: Iterable[K]) -> None:
        """Forget what is there of these keys."""
        with self._guard:
            for key in keys:
                former = self._drop(key)
                for watcher in self._watchers if former is not None else ():
                    watcher(former, None)

    def __bool__(self) -> bool:
        return bool(self._values)

    def get(self, key: K) -> V | None:
        """Return the value of a key."""
        with self._guard:
            return self._values.get(key)

    def all(self) -> tuple[V, ...]:
        """List all values, in the order in which their keys came."""
        with self._guard:
            return tuple(self._values.values())

    def of_device(self, device: str) -> tuple[V, ...]:
        """List a device's values, in the order in which their keys came."""
        with self._guard:
            return tuple(self._of_device.get(device, {}).values())

    def _drop(self, key: K, keep_place: bool = False) -> V | None:
        former = self._values.get(key)
        if former is None:
            return None
        for device in self._devices(former):
            siblings = self._of_device[device]
            del siblings[key]
            if not siblings:
                del self._of_device[device]
        if not keep_place:
            del self._values[key]
        return former


READ_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Books:
    """All that the ledger held at one moment."""

    holds: tuple[Hold, ...] = ()
    """By units and slots; those that were bound in an earlier boot are so still."""
    attachments: tuple[Attachment, ...] = ()
    quarantines: tuple[Quarantine, ...] = ()
    owed_leases: tuple[OwedLease, ...] = ()
    claims: tuple[Claim, ...] = ()


def read_books(path: Path) -> Books:
    """Read a ledger file. One that is not there is empty.

    Raises LedgerError for a file that is damaged, cannot be read, or is of a newer version.
    """
    if not path.exists():
        return Books()
    with _copied(path) as copy:
        holds, claims = rows.holds_and_claims(copy.execute)
        read = copy.execute
        return Books(holds, rows.attachments(read), rows.quarantines(read), rows.owed_leases(read), claims)


def read_rails(path: Path) -> tuple[Rail, ...]:
    """Read how a node's rails were numbered last. Raises LedgerError as `read_books`, and for no books."""
    with _copied(path) as copy:
        return rows.rails(copy.execute)


@contextlib.contextmanager
def _copied(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        path.stat()
        with contextlib.closing(_connected(":memory:")) as copy:
            _copy(path, copy)
            schema.bring_up_to_date(copy, path)
            yield copy
    except FileNotFoundError as error:
        raise LedgerError(f"{path} is not there") from error
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(f"{path} cannot be read: {error}: run this as root, with the agent's stateDir") from error


def _copy(path: Path, copy: sqlite3.Connection) -> None:
    source = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=READ_SECONDS)
    with contextlib.closing(source):
        source.backup(copy)
