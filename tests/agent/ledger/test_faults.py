"""What may happen to the books: a killed process, a damaged file, a full or unwritable disk, a second agent."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from agent import ledger
from agent.errors import LedgerDamaged, LedgerError, LedgerInUse
from agent.ledger import Ledger
from agent.ledger.database import is_locked, lock_folder, read_books
from agent.model.allocation import Attachment, AttachmentState, Hold
from tests.node import POD, VF, attach, granted, open_books, owner

ATTACHES_AND_WAITS = """
import sys
from pathlib import Path
from tests.node import VF, attach, granted, open_books, owner
with open_books(Path(sys.argv[1])) as books:
    books.grant(granted("rdma/vf", {"u1": VF}))
    row = attach(books, VF, owner("killed"))
    if sys.argv[2] == "attached":
        books.finish_attach([row.attachment_id], {"cniVersion": "1.0.0"})
    print("written", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["attaching", "attached"])
def test_what_was_written_survives_a_kill(tmp_path: Path, state: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ATTACHES_AND_WAITS, str(tmp_path), state],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / "ledger.db-wal").stat().st_size > 0
    assert [found.state for found in read_books(tmp_path / "ledger.db").attachments] == [state]
    with open_books(tmp_path) as books:
        (row,) = books.attachments()
        assert (row.owner.container_id, row.state) == ("killed", AttachmentState(state))
        assert [hold.key for hold in books.holds()] == ["u1"]
        assert books.recovered_from is None


@pytest.mark.parametrize(
    "content",
    [b"this is no database, but long enough to be one" * 40, b"SQLite format 3\0" + b"\xff" * 4080],
)
def test_a_damaged_file_is_set_aside_and_new_books_begun(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ledger.db").write_bytes(content)
    with open_books(tmp_path, clock=lambda: 1234.5) as books:
        assert books.recovered_from == tmp_path / "ledger.db.damaged-1234"
        assert books.recovered_from.read_bytes() == content
        assert books.holds() == ()
        attach(books, VF, owner())


def test_only_the_newest_damaged_files_are_kept(tmp_path: Path) -> None:
    for second in range(1000, 1005):
        (tmp_path / "ledger.db").write_bytes(b"damaged" * 1000)
        with open_books(tmp_path, clock=partial(float, second)) as books:
            copies = books.damaged_copies()
    assert [copy.name for copy in copies] == [f"ledger.db.damaged-{second}" for second in (1002, 1003, 1004)]


def test_damage_inside_a_file_is_found_when_it_is_opened(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.grant(granted("rdma/vf", {f"unit-{i}": VF for i in range(2000)}))
    path = tmp_path / "ledger.db"
    content = bytearray(path.read_bytes())
    assert len(content) > 100_000
    content[40_000:60_000] = b"\xa5" * 20_000
    path.write_bytes(content)
    with open_books(tmp_path) as books:
        assert books.recovered_from is not None
        assert books.holds() == ()


def scribble(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xa5" * path.stat().st_size)


def scribble_in_the_middle(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xa5" * (size - size // 2))


def cut(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("hurt", [scribble, scribble_in_the_middle, cut, Path.unlink])
def test_damage_under_open_books_is_told_and_the_next_start_begins_new_ones(
    tmp_path: Path, hurt: Callable[[Path], None]
) -> None:
    path = tmp_path / "ledger.db"
    with open_books(tmp_path) as books:
        books.grant(granted("rdma/vf", {f"unit-{i}": f"0000:3b:{i:02x}.0" for i in range(200)}))
        books.probe()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:  # nothing in its log
            assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        hurt(path)
        with pytest.raises(LedgerDamaged, match=r"ledger\.db is damaged: .*: see to its disk"):
            books.probe()
    with open_books(tmp_path, clock=lambda: 1234.5) as books:
        is_there = hurt in (scribble, scribble_in_the_middle)
        assert books.recovered_from == (tmp_path / "ledger.db.damaged-1234" if is_there else None)
        assert books.damaged_copies() == ((books.recovered_from,) if books.recovered_from else ())
        assert books.is_new
        assert books.holds() == ()
        books.probe()


def test_an_empty_file_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").touch()
    with open_books(tmp_path) as books:
        assert books.recovered_from is None
        books.quarantine(VF, "reason")


def test_books_of_a_newer_version_are_refused_and_left_alone(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.grant(granted("rdma/vf", {"u1": VF}))
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        db.execute(f"PRAGMA user_version = {ledger.SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(LedgerError, match=r"written by a newer nodefabric \(format \d+, this one knows \d+\)"):
        Ledger.open(tmp_path / "ledger.db", "boot")
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.db"]


def mount_small_disk(path: Path, *options: str) -> Path:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(("size=256k", *options)), "test", path], check=True)
    return path


@pytest.fixture
def small_disk(own_network: None, tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB, in the mount namespace of the test run."""
    path = mount_small_disk(tmp_path / "disk")
    yield path
    subprocess.run(["umount", path], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"\0" * size) == size:
                    pass
            except OSError:
                continue
    return filler


def test_a_full_disk_is_a_ledger_error_that_changes_nothing_and_passes(small_disk: Path) -> None:
    with open_books(small_disk) as books:
        books.grant(granted("rdma/vf", {"u1": VF}))
        row = attach(books, VF, owner("before"))
        filler = fill(small_disk)
        written: list[Attachment] = []

        def attach_for_ever() -> None:
            for number in range(1000):
                written.append(attach(books, f"0000:{number:04x}", owner("full")))

        with pytest.raises(LedgerError, match="free space or repair the disk; nothing was changed"):
            attach_for_ever()
        with pytest.raises(LedgerError, match="nothing was changed"):
            books.grant(granted("rdma/vf", {f"unit-{i}": VF for i in range(1000)}))
        with pytest.raises(LedgerError, match="nothing was changed"):
            books.finish_attach([row.attachment_id], {"x": "y" * 100_000})
        # Reading goes on, and shows all that was promised and nothing else.
        assert books.attachments() == (row, *written)
        assert [hold.key for hold in books.holds()] == ["u1"]
        filler.unlink()
        books.finish_attach([row.attachment_id], {})
        books.bind(["u1"], POD)
    with open_books(small_disk) as books:
        assert books.recovered_from is None
        assert len(books.attachments()) == 1 + len(written)


def test_books_that_find_no_room_to_begin_begin_later(small_disk: Path) -> None:
    filler = fill(small_disk)
    with pytest.raises(LedgerError, match="free space"):
        Ledger.open(small_disk / "ledger.db", "boot")
    filler.unlink()
    with open_books(small_disk) as books:
        assert books.recovered_from is None
        attach(books, VF, owner())


def test_books_on_a_disk_that_filled_up_can_still_be_opened_and_read(small_disk: Path) -> None:
    """SQLite needs room for its shared memory file alone."""
    with open_books(small_disk) as books:
        attach(books, VF, owner())
    reserve = small_disk / "reserve"
    reserve.write_bytes(b"\0" * 40_960)
    fill(small_disk)
    reserve.unlink()
    with open_books(small_disk) as books:
        assert len(books.attachments()) == 1


def test_a_disk_that_cannot_be_written_is_a_ledger_error(own_network: None, tmp_path: Path) -> None:
    disk = mount_small_disk(tmp_path / "disk")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
        with pytest.raises(LedgerError, match=r"disk/ledger\.db"):
            Ledger.open(disk / "ledger.db", "boot")
        subprocess.run(["mount", "-o", "remount,bind,rw", disk], check=True)
        (disk / "ledger.db").write_bytes(b"damaged" * 1000)
        subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
        with pytest.raises(LedgerError, match=r"disk/ledger\.db"):
            Ledger.open(disk / "ledger.db", "boot")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_in_place_of_the_file_is_a_ledger_error(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").mkdir()
    with pytest.raises(LedgerError, match=r"ledger\.db"):
        Ledger.open(tmp_path / "ledger.db", "boot")


def test_a_row_that_this_version_does_not_understand_is_told_and_kept(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        attach(books, VF, owner())
    change = "UPDATE attachments SET undo = json_set(undo, '$.from_the_future', 1)"
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        db.execute(change)
    descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    with pytest.raises(LedgerError, match=rf"the attachment of {VF} .*from_the_future.*install the version"):
        Ledger.open(tmp_path / "ledger.db", "boot")
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert set(threading.enumerate()) <= threads
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        db.execute(change.replace("json_set", "json_remove").replace(", 1)", ")"))
    with open_books(tmp_path) as books:
        assert len(books.attachments()) == 1


def test_a_probe_tells_of_a_full_disk_and_of_its_end(small_disk: Path) -> None:
    with open_books(small_disk) as books:
        books.probe()
        filler = fill(small_disk)

        def probe_for_ever() -> None:
            while True:  # the write-ahead log has room for a while
                books.probe()

        with pytest.raises(LedgerError, match="free space"):
            probe_for_ever()
        filler.unlink()
        books.probe()


class RefusesToRollBack:
    """A connection whose disk fails in the midst of taking a change back."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql == "ROLLBACK":
            raise sqlite3.OperationalError("disk I/O error")
        return self._db.execute(sql, *values)


def test_after_a_change_that_cannot_be_taken_back_only_another_start_helps(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        books.grant(granted("rdma/vf", {"u0": VF}))
        books._db = cast(sqlite3.Connection, RefusesToRollBack(books._db))
        with pytest.raises(LedgerError, match="nothing was changed"):
            books.grant([Hold("u1", cast(str, None))])  # refused by the schema
        for use in (books.probe, partial(books.quarantine, VF, "x")):
            with pytest.raises(LedgerDamaged, match=r"a change could not be taken back \(disk I/O error\)"):
                use()
    with open_books(tmp_path) as again:
        assert again.recovered_from is None
        assert {hold.key for hold in again.holds()} == {"u0"}


def test_nobody_else_reads_the_books_whoever_made_their_folder(tmp_path: Path) -> None:
    """kubelet makes it readable for all. The configuration of a network may hold what its IPAM plugin logs in with."""
    tmp_path.chmod(0o755)
    with open_books(tmp_path) as books:
        attach(books, VF, owner())
        files = [path for path in tmp_path.iterdir() if path.is_file()]
        assert {path.name: path.stat().st_mode & 0o777 for path in files} == {path.name: 0o600 for path in files}
        assert len(files) > 2
    books.path.chmod(0o644)
    with open_books(tmp_path) as books:
        attach(books, "0000:3b:00.7", owner("c2"))
        assert [path.name for path in tmp_path.iterdir() if path.is_file() and path.stat().st_mode & 0o077] == []


def test_one_agent_at_a_time_has_the_books_and_others_can_see_that(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    lock = lock_folder(tmp_path)
    try:
        assert is_locked(tmp_path)
        with pytest.raises(LedgerInUse, match="in use by another agent"):
            lock_folder(tmp_path)
    finally:
        os.close(lock)
    assert not is_locked(tmp_path)
    os.close(lock_folder(tmp_path))


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="cannot be used: "):
        lock_folder(tmp_path / "file/state")
