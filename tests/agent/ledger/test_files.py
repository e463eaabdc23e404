"""The books' files: claimed by one agent; and damaged while they are open, which loses nothing that is in memory."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.errors import LedgerError, LedgerInUse
from agent.ledger import Ledger
from agent.ledger.database import MOST_REWRITES, is_damage, is_locked, lock_folder
from agent.model.allocation import Binding, Claim, ClaimDevice, ClaimRef, ClaimState
from agent.model.vf_identity import KnownDevice
from tests.node import POD, VF, attach, open_books, owner

OTHER = "0000:3b:00.3"


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


DAMAGES: list[Callable[[Path], None]] = [scribble, scribble_in_the_middle, cut, Path.unlink]


def on_disk(folder: Path) -> None:
    """Have all that was written in the file itself, and none of it in its log."""
    with contextlib.closing(sqlite3.connect(folder / "ledger.db", isolation_level=None)) as other:
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


def fill(books: Ledger) -> None:
    """Write something of everything."""
    books.grant("rdma/vf", {f"unit-{i}": f"0000:3b:{i:02x}.0" for i in range(200)})
    books.grant("rdma/slot", {"slot-rdma:vf-0-1": ""})
    books.bind(["unit-3"], POD)
    books.bind_slots(
        [Binding("slot-rdma:vf-0-1", "rdma/slot", "vf", OTHER, "main", "c9", "net1", POD, {"env": ["A=B"]}, "", 0.0)]
    )
    row = attach(books, request={"token": "s3cret"})
    books.finish_attach([row.attachment_id], {"cniVersion": "1.0.0"})
    attach(books, OTHER, owner("c2"))
    books.quarantine("0000:3b:01.7", "cannot be cleaned")
    books.owe_lease("c7", "net1", "/nowhere", {"network": {"ipam": {"type": "x"}}})
    books.know([KnownDevice(VF, "id", "ens1f0v0", "02:00:00:00:01:00", 1500, "boot")])
    books.prepare_claim(
        Claim(
            ClaimRef("uid-claim", "default", "nics"),
            ClaimState.PREPARING,
            (
                ClaimDevice("a", "node", "vf-1", "dra/vf", "vf", "0000:5e:00.2", "n-1", edits={"env": ["A=B"]}),
                ClaimDevice("b", "node", "hca-1", "dra/hca", "hca", "0000:5e:00.0", "n-2", "share-1", exclusive=False),
            ),
            (POD,),
            POD.uid,
        )
    )
    books.set_claim_state("uid-claim", ClaimState.PREPARED)
    books.probe()


def content(books: Ledger) -> tuple[object, ...]:
    grants = sorted(books.grants(), key=lambda grant: grant.unit_id)
    upkeep = books.quarantines(), books.owed_leases(), books.known_devices()
    edits = [found.edits for claim in books.claims() for found in claim.devices]
    return grants, books.attachments(), books.bindings(), upkeep, books.claims(), edits


@pytest.mark.parametrize("hurt", DAMAGES)
def test_a_damaged_file_is_found_set_aside_and_written_anew(tmp_path: Path, hurt: Callable[[Path], None]) -> None:
    path = tmp_path / "ledger.db"
    with open_books(tmp_path, clock=lambda: 1234.5) as books:
        fill(books)
        before = content(books)
        on_disk(tmp_path)
        hurt(path)
        hurt_bytes = path.read_bytes() if path.exists() else None
        books.probe()
        assert content(books) == before
        assert books.damaged_copies() == (() if hurt_bytes is None else (tmp_path / "ledger.db.damaged-1234",))
        assert [each.read_bytes() for each in books.damaged_copies()] == [hurt_bytes] * (hurt_bytes is not None)
        assert path.stat().st_mode & 0o777 == 0o600
        books.probe()
        row = attach(books, "0000:3b:01.1", owner("c3"))
        books.finish_attach([row.attachment_id], {})
        books.release(["unit-3"])
        after = content(books)
    with open_books(tmp_path) as books:
        assert books.recovered_from is None
        assert content(books) == after
        assert len(books.attachments()) == 3


def test_what_was_left_to_do_at_the_last_look_is_not_forgotten(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        fill(books)
        upkeep = content(books)[3]
    with open_books(tmp_path) as books:
        scribble(tmp_path / "ledger.db")
        books.probe()
        assert content(books)[3] == upkeep


@pytest.mark.parametrize("hurt", [scribble, scribble_in_the_middle])
def test_who_meets_the_damage_gets_an_answer_all_the_same(tmp_path: Path, hurt: Callable[[Path], None]) -> None:
    with open_books(tmp_path) as books:
        fill(books)
        on_disk(tmp_path)
        hurt(tmp_path / "ledger.db")
        assert len(books.quarantines()) <= 1
        books.grant("rdma/vf", {"new": VF})
        books.owed_leases()
        books.probe()
        assert len(books.damaged_copies()) == 1
        assert books.pod_of("unit-3") == POD


def test_many_who_meet_the_damage_at_once_have_the_file_written_anew_once(tmp_path: Path) -> None:
    failures: list[Exception] = []
    with open_books(tmp_path) as books:
        fill(books)
        on_disk(tmp_path)
        scribble(tmp_path / "ledger.db")
        here = threading.Barrier(8)

        def use(number: int) -> None:
            here.wait()
            try:
                books.probe()
                books.quarantines()
                books.grant("rdma/vf", {f"new-{number}": VF})
            except LedgerError as error:
                failures.append(error)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(books.damaged_copies()) == 1
    with open_books(tmp_path) as books:
        assert {f"new-{number}" for number in range(8)} <= {grant.unit_id for grant in books.grants()}


@pytest.fixture
def no_room(tmp_path: Path) -> Callable[[], None]:
    """Take the room for another file, until called."""
    obstacle = tmp_path / "ledger.db.new"
    (obstacle / "in the way").mkdir(parents=True)

    def end() -> None:
        (obstacle / "in the way").rmdir()
        obstacle.rmdir()

    return end


def test_a_file_that_cannot_be_written_anew_yet_is_told_and_left_where_it_is(
    tmp_path: Path, no_room: Callable[[], None]
) -> None:
    with open_books(tmp_path) as books:
        fill(books)
        on_disk(tmp_path)
        scribble(tmp_path / "ledger.db")
        for _ in range(MOST_REWRITES + 1):
            with pytest.raises(LedgerError, match=r"ledger\.db"):
                books.probe()
        assert books.damaged_copies() == ()
        no_room()
        books.probe()
        assert len(books.damaged_copies()) == 1
        assert len(books.attachments()) == 2


def test_a_disk_that_damages_the_file_again_and_again_is_told(tmp_path: Path) -> None:
    times = iter(range(1_000_000))
    with open_books(tmp_path, clock=lambda: float(next(times))) as books:
        fill(books)
        for _ in range(MOST_REWRITES):
            on_disk(tmp_path)
            scribble(tmp_path / "ledger.db")
            books.probe()
        assert len(books.damaged_copies()) == MOST_REWRITES
        on_disk(tmp_path)
        scribble(tmp_path / "ledger.db")
        with pytest.raises(LedgerError, match="damaged again and again, now: file is not a database: see to its disk"):
            books.probe()
        assert len(books.attachments()) == 2


def test_what_is_no_fault_of_the_content_is_no_damage() -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as db, pytest.raises(sqlite3.OperationalError) as caught:
        db.execute("SELECT * FROM nothing")
    assert not is_damage(caught.value)
    assert not is_damage(OSError())
    assert not is_damage(None)


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
