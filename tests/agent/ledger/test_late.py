"""Attachments that the database does not hold yet: it is busy, full, or the agent dies first."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.errors import DeviceBusy, LedgerError
from agent.ledger import Ledger, journal, reading
from agent.ledger.alarm import Alarm
from agent.ledger.late import LateRows
from agent.model.allocation import AttachmentState, Undo
from tests.agent.books import VF, attach, open_books, owner
from tests.agent.ledger.on_disk import busy, die, in_database, path_of, seen, until_empty
from tests.waiting import until

OTHER = "0000:3b:00.3"


@pytest.mark.parametrize("state", [AttachmentState.ATTACHING, AttachmentState.ATTACHED])
def test_what_the_database_lacks_survives_the_agent(tmp_path: Path, state: AttachmentState) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    with open_books(folder) as books, busy(folder):
        row = attach(books, VF, owner())
        if state is AttachmentState.ATTACHED:
            books.finish_attach([row.attachment_id], {"cniVersion": "1.0.0"})
        assert in_database(folder) == []
        expected = books.attachments()
        die(folder, tmp_path / "grave")
    with open_books(tmp_path / "grave") as books:
        assert books.attachments() == expected
        assert in_database(tmp_path / "grave") == [(VF, state.value)]
        assert journal.read(path_of(tmp_path / "grave")) == {}


def test_the_journal_knows_better_than_the_database(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    with open_books(folder) as books:
        row = attach(books, VF, owner())
        until_empty(folder)
        with busy(folder):
            books.finish_attach([row.attachment_id], {})
            assert in_database(folder) == [(VF, "attaching")]
            die(folder, tmp_path / "grave")
    with open_books(tmp_path / "grave") as books:
        assert seen(books.attachments()) == [(VF, "attached")]


def test_the_database_follows_by_itself(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        row = attach(books, VF, owner())
        books.finish_attach([row.attachment_id], {})
        until_empty(tmp_path)
        assert in_database(tmp_path) == [(VF, "attached")]


def test_every_other_change_comes_after_what_is_late(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        row = attach(books, VF, owner())
        books.begin_detach([row.attachment_id])
        assert in_database(tmp_path) == [(VF, "detaching")]
        assert journal.read(path_of(tmp_path)) == {}
        books.finish_detach(row)
        assert in_database(tmp_path) == []


def test_a_row_that_the_database_never_took_is_told_of_when_it_goes(tmp_path: Path) -> None:
    told: list[int] = []
    with open_books(tmp_path) as books:
        books.subscribe(lambda: told.append(len(books.attachments())))
        with unwritable(books):
            row = attach(books, VF, owner(), text="x" * 7000)
            with pytest.raises(LedgerError, match="full"):
                books.await_durable(row)
            books.finish_detach(row)
        assert told == [0]


def test_leases_wait_until_the_row_outlives_a_power_cut(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        with busy(tmp_path):
            row = attach(books, VF, owner())
            waiting = threading.Thread(target=books.await_durable, args=[row])
            waiting.start()
            waiting.join(0.1)
            assert waiting.is_alive()
        waiting.join(10)
        assert in_database(tmp_path) == [(VF, "attaching")]


def test_another_process_reads_what_is_late_too(tmp_path: Path) -> None:
    with open_books(tmp_path) as books, busy(tmp_path):
        attach(books, VF, owner())
        assert seen(reading.read(tmp_path / "ledger.db").attachments) == [(VF, "attaching")]


def test_another_process_misses_no_row_on_its_way_into_the_database(tmp_path: Path) -> None:
    begun: list[str] = []
    misses: list[set[str]] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            known = set(begun)
            misses.append(known - {row.device for row in reading.read(tmp_path / "ledger.db").attachments})

    with open_books(tmp_path) as books:
        reader = threading.Thread(target=look)
        reader.start()
        for number in range(300):
            device = f"0000:3b:{number // 8:02x}.{number % 8}"
            attach(books, device, owner())
            begun.append(device)
        ended.set()
        reader.join(30)
    assert misses
    assert not any(misses)


def test_an_id_is_never_used_twice_while_somebody_may_hold_it(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        rows = []
        for number in range(4):
            rows.append(attach(books, VF, owner()))
            if number % 2:
                books.await_durable(rows[-1])
            books.finish_detach(rows[-1])
        ids = [row.attachment_id for row in rows]
        assert ids == sorted(set(ids))
    with open_books(tmp_path) as books:  # nobody holds those that the database never heard of
        assert attach(books, VF, owner()).attachment_id > rows[3].attachment_id


@pytest.mark.parametrize("by", ["adopt", "begin_attach"])
def test_a_device_has_one_owner_however_the_rows_go_into_the_books(tmp_path: Path, by: str) -> None:
    done: list[str] = []

    def slowly() -> None:
        try:
            if by == "adopt":
                undo = Undo("", "", 0, False)
                who = owner("c1")
                books.adopt(
                    who, ifname="net1", device=VF, resource_name="", undo=undo, netns_path="/nowhere", request={}
                )
            else:
                attach(books, VF, owner("c1"), text="x" * 100_000)
            done.append("slowly")
        except DeviceBusy:
            done.append("busy")

    def quickly() -> None:
        try:
            attach(books, VF, owner("c2"))
            done.append("quickly")
        except DeviceBusy:
            done.append("busy")

    with open_books(tmp_path) as books:
        threads = [threading.Thread(target=work) for work in (slowly, quickly)]
        with busy(tmp_path):
            for thread in threads:
                thread.start()
                thread.join(0.2)  # the first waits for the database, and the second must not overtake it
        for thread in threads:
            thread.join(10)
        assert sorted(done) in (["busy", "quickly"], ["busy", "slowly"])
        books.await_durable(books.attachments()[0])
        assert [row.device for row in books.attachments()] == [VF]
        assert in_database(tmp_path) == seen(books.attachments())


def test_a_row_written_while_the_books_are_closed_leaves_nothing_in_the_journal(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        row = attach(books, VF, owner())
        late = LateRows(lambda: None)
        late.open(tmp_path / "rows")
        late.end()
        assert late.put(row, durable=False)
        late.settled(late.waiting())
        late.close()
        assert not (tmp_path / "rows").exists()


def test_a_large_request_goes_straight_into_the_database(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        attach(books, VF, owner(), text="x" * 100_000)
        assert in_database(tmp_path) == [(VF, "attaching")]
        assert journal.read(path_of(tmp_path)) == {}


def test_a_disk_without_room_for_the_journal_is_no_obstacle(tmp_path: Path, own_network: None) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "nodefabric-test", tmp_path], check=True)
    with open_books(tmp_path) as books:
        attach(books, VF, owner())
        assert in_database(tmp_path) == [(VF, "attaching")]
    subprocess.run(["umount", tmp_path], check=True)


def test_rows_of_an_earlier_process_are_read_once_though_the_kernel_gives_no_timer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, grave = tmp_path / "state", tmp_path / "grave"
    folder.mkdir()
    with open_books(folder) as books, busy(folder):
        attach(books, VF, owner())
        die(folder, grave)

    def refuse(_seconds: float) -> None:
        raise PermissionError(errno.EPERM, "timerfd_create")

    with monkeypatch.context() as patch:
        patch.setattr("agent.ledger.late.Alarm", refuse)
        with open_books(grave) as books:
            (row,) = books.attachments()
            books.finish_detach(row)
            other = attach(books, OTHER, owner("c2"))
            assert in_database(grave) == [(OTHER, "attaching")]
            books.finish_detach(other)
    with open_books(grave) as books:
        assert books.attachments() == ()


@contextlib.contextmanager
def unwritable(books: Ledger) -> Iterator[None]:
    """Have the database refuse to grow, as a full disk does; the journal has its room already."""
    (pages,) = books._db.execute("PRAGMA page_count").fetchone()
    books._db.execute(f"PRAGMA max_page_count = {pages}")
    yield
    books._db.execute("PRAGMA max_page_count = 1000000")


def test_a_database_that_takes_nothing_more_is_told_before_the_next_pod(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        with unwritable(books):
            first = attach(books, VF, owner("c1"), text="x" * 7000)  # more than the pages there can hold
            with pytest.raises(LedgerError, match="full"):
                books.await_durable(first)
            with pytest.raises(LedgerError, match="full"):
                attach(books, OTHER, owner("c2"), text="x" * 7000)
            assert seen(books.attachments()) == [(VF, "attaching")]
            books.finish_detach(first)
            assert books.attachments() == ()
        row = attach(books, OTHER, owner("c3"), text="x" * 7000)
        books.finish_attach([row.attachment_id], {})
        assert in_database(tmp_path)
        assert seen(books.attachments()) == [(OTHER, "attached")]


def test_the_database_follows_though_the_timer_goes_off_before_it_is_noted_as_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Alarm):
        def set(self) -> bool:
            done = super().set()
            time.sleep(0.05)
            return done

    with monkeypatch.context() as patch:
        patch.setattr("agent.ledger.late.Alarm", Slow)
        with open_books(tmp_path) as books:
            for number, device in enumerate((VF, OTHER)):
                attach(books, device, owner(f"c{number}"))
                until_empty(tmp_path)
            assert in_database(tmp_path) == [(VF, "attaching"), (OTHER, "attaching")]


@pytest.mark.parametrize("count", [1, 2])
def test_a_row_whose_end_is_being_promised_does_not_become_attached_any_more(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    with open_books(folder) as books:
        ids = [attach(books, device, owner()).attachment_id for device in (VF, OTHER)[:count]]
        until_empty(folder)
        promising = threading.Thread(target=books.begin_detach, args=[ids])
        with busy(folder):
            promising.start()
            until(lambda: books._promised)
            with pytest.raises(LedgerError, match="not in state attaching"):
                books.finish_attach(ids, {})
        promising.join(10)
        expected = books.attachments()
        assert {state for _, state in seen(expected)} == {"detaching"}
        die(folder, tmp_path / "grave")
    with open_books(tmp_path / "grave") as books:
        assert books.attachments() == expected


def test_rows_that_wait_for_a_promise_to_be_written_do_not_become_attached_after_it(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        ids = [attach(books, device, owner()).attachment_id for device in (VF, OTHER)]
        until_empty(tmp_path)
        books._writing.acquire()
        failed: list[LedgerError] = []

        def finish() -> None:
            try:
                books.finish_attach(ids, {})
            except LedgerError as error:
                failed.append(error)

        finishing = threading.Thread(target=finish)
        finishing.start()
        finishing.join(0.2)
        promising = threading.Thread(target=books.begin_detach, args=[ids])
        promising.start()
        until(lambda: books._promised)
        books._writing.release()
        finishing.join(10)
        promising.join(10)
        assert len(failed) == 1
        assert {state for _, state in seen(books.attachments())} == {"detaching"}
        assert {state for _, state in in_database(tmp_path)} == {"detaching"}


def test_a_row_becomes_attached_though_a_promise_of_its_end_could_not_be_written(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        row = attach(books, VF, owner())
        until_empty(tmp_path)
        books._db.execute("PRAGMA query_only = ON")
        with pytest.raises(LedgerError):
            books.begin_detach([row.attachment_id])
        books._db.execute("PRAGMA query_only = OFF")
        books.finish_attach([row.attachment_id], {})
        assert seen(books.attachments()) == [(VF, "attached")]
