"""The books: grants, attachments, quarantine and owed leases, in a real SQLite file."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import DeviceBusy, LedgerError
from agent.ledger import Ledger
from tests.node import POD, VF, attach, granted, open_books, owner


def test_granting_a_unit_again_begins_a_new_life_without_an_owner(tmp_path: Path) -> None:
    now = [100.0]
    with open_books(tmp_path, clock=lambda: now[0]) as books:
        books.grant(granted("rdma/vf", {"u1": VF}))
        books.bind(["u1"], POD)
        now[0] = 200.0
        books.grant(granted("rdma/other", {"u1": "0000:3b:00.3"}))
        (grant,) = books.holds()
    assert (grant.resource_name, grant.device, grant.since, grant.pod) == (
        "rdma/other",
        "0000:3b:00.3",
        200.0,
        None,
    )


def test_a_device_is_attached_once_at_most_however_many_try(books: Ledger) -> None:
    start, busy = threading.Barrier(8), list[str]()

    def attempt(container: str) -> None:
        start.wait()
        try:
            attach(books, VF, owner(container))
        except DeviceBusy:
            busy.append(container)

    threads = [threading.Thread(target=attempt, args=(f"c{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (row,) = books.attachments()
    assert sorted([*busy, row.owner.container_id]) == [f"c{i}" for i in range(8)]


def test_no_read_waits_for_a_write_that_is_under_way(books: Ledger) -> None:
    writing, done = threading.Event(), threading.Event()

    def hold_up() -> None:
        writing.set()
        done.wait(30)

    books.subscribe(hold_up)
    writer = threading.Thread(target=books.grant, args=(granted("rdma/vf", {"u1": VF}),))
    writer.start()
    try:
        assert writing.wait(30)
        assert books.resource_held(VF) == "rdma/vf"
        assert writer.is_alive()
    finally:
        done.set()
        writer.join()


def test_the_file_itself_refuses_a_second_attachment_of_a_device(tmp_path: Path) -> None:
    with open_books(tmp_path) as one, open_books(tmp_path) as other:
        one.finish_detach(attach(one, "0000:3b:00.7", owner("c0")))  # takes the number that the other will take
        attach(one, VF, owner("c1"))
        with pytest.raises(DeviceBusy, match=VF):
            other.adopt(replace(one.attachments()[0], owner=owner("c2")))


def test_an_attachment_can_be_finished_only_while_it_is_attaching(books: Ledger) -> None:
    one, two = attach(books, VF, owner()), attach(books, "0000:3b:00.3", owner())
    books.begin_detach([two.attachment_id])
    with pytest.raises(LedgerError, match="is not in state attaching"):
        books.finish_attach([one.attachment_id, two.attachment_id], {})
    # All or nothing: the first row is as it was.
    assert [row.state.value for row in books.attachments()] == ["attaching", "detaching"]


def test_a_finished_detach_frees_the_device_and_ends_its_quarantine(books: Ledger) -> None:
    row = attach(books, VF, owner())
    books.begin_detach([row.attachment_id])
    books.quarantine(VF, "it does not come back")
    books.quarantine(VF, "a later reason")
    assert [(q.device, q.reason) for q in books.quarantines()] == [(VF, "it does not come back")]
    books.finish_detach(row)
    books.finish_detach(row)
    assert (books.attachments(), books.quarantines(), books.owed_leases()) == ((), (), ())
    attach(books, VF, owner("c2"))


def test_row_numbers_are_not_used_again(books: Ledger) -> None:
    """A late clean-up of an old row must not hit a new one."""
    first = attach(books, VF, owner("c1"))
    books.finish_detach(first)
    assert attach(books, VF, owner("c2")).attachment_id > first.attachment_id


def test_what_is_owed_takes_no_more_than_so_much_room(books: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """All of it is read each minute, and after each start."""
    long = {"network": {"ipam": {"type": "stub", "x": "y" * 65_000}}}
    for number in range(80):
        books.owe_lease(f"c{number}", "net1", "/netns", long)
    owed = books.owed_leases()
    assert 60 < len(owed) < 70
    row = attach(books, VF, owner("c99"))
    books.finish_detach(row, lease_owed=True)
    assert (books.attachments(), books.owed_leases()) == ((), owed)
    assert "the addresses of net1 in container c99 will not be given back: pending leases take" in caplog.text
    for lease in owed[:5]:
        books.settle_lease(lease.lease_id)
    books.owe_lease("c100", "net1", "/netns", long)
    assert len(books.owed_leases()) == len(owed) - 4


def test_leases_without_a_row_are_owed_once_however_often_that_is_promised(tmp_path: Path) -> None:
    request = {"network": {"ipam": {"type": "stub"}}}
    with open_books(tmp_path) as books:
        for _ in range(2):
            books.owe_lease("c1", "net1", "/netns", request)
        books.owe_lease("c1", "net2", "/netns", request)
    with open_books(tmp_path) as books:
        first, second = books.owed_leases()
        assert (first.container_id, first.ifname, first.netns_path, first.request) == ("c1", "net1", "/netns", request)
        assert second.ifname == "net2"


def test_nothing_is_left_open_or_beside_the_file_after_a_close(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    with open_books(tmp_path) as books:
        books.grant(granted("rdma/vf", {"u1": VF}))
    assert set(threading.enumerate()) <= threads  # one of another test may have ended meanwhile
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.db"]
