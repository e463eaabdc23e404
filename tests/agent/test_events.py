"""Recent events: what is told of grants, attachments, health and obstacles, and that the list has an end."""

from __future__ import annotations

from pathlib import Path

from agent.events import MOST_TEXT, SAME_SECONDS, Events, tell_health
from agent.model.health import HEALTHY, Health, unhealthy
from agent.obstacles import Obstacles
from tests.agent.books import POD, VF, attach, open_books, owner


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Offered:
    """One unit of rdma/vf."""

    resource_name = "rdma/vf"
    numa_node = 0

    def __init__(self, device: str, health: Health = HEALTHY) -> None:
        self.unit_id = f"unit-{device}"
        self.device = device
        self.health = health


def lines(events: Events) -> list[tuple[str, str, str]]:
    """Oldest first."""
    return [(e.kind, e.subject, e.text) for e in reversed(events.listed())]


def test_the_life_of_a_vf_is_told_by_the_books(tmp_path: Path) -> None:
    events = Events()
    with open_books(tmp_path) as books:
        books.watch_grants(events.grant_changed)
        books.watch_attachments(events.attachment_changed)
        books.grant("rdma/vf", {"unit-1": VF})
        row = attach(books, VF, owner("c1", "net1"))
        books.finish_attach([row.attachment_id], {})
        books.bind(["unit-1"], POD)
        books.bind(["unit-1"], POD)
        books.begin_detach([row.attachment_id])
        books.finish_detach(row)
        books.release(["unit-1"])
        books.release(["unit-1"])
    assert lines(events) == [
        ("grant", VF, "rdma/vf to kubelet"),
        ("attach", VF, "is net1 of default/trainer"),
        ("grant", VF, "rdma/vf to default/trainer"),
        ("detach", VF, "net1 of default/trainer is back in the host"),
        ("release", VF, "rdma/vf of default/trainer is free"),
    ]
    assert not any(event.warning for event in events.listed())


def test_an_attachment_that_was_never_finished_is_a_warning(tmp_path: Path) -> None:
    events = Events()
    with open_books(tmp_path) as books:
        books.watch_attachments(events.attachment_changed)
        row = attach(books, VF, owner("c1", "net1"))
        books.finish_detach(row)
    (event,) = events.listed()
    assert (event.kind, event.text, event.warning) == ("detach", "did not become net1 of default/trainer", True)


def test_many_units_that_fail_together_are_one_event() -> None:
    names = [f"0000:3b:00.{n}" for n in range(5)]
    before = {"rdma/vf": [Offered(name) for name in names]}
    down = {"rdma/vf": [Offered(name, unhealthy("LinkDown")) for name in names[:4]] + [Offered(names[4])]}
    assert list(tell_health(before, down)) == [("0000:3b:00.0 and 3 more", "LinkDown (rdma/vf)", True)]
    assert list(tell_health(down, down)) == []
    assert list(tell_health(down, before)) == [
        ("0000:3b:00.0 and 3 more", "healthy again, was LinkDown (rdma/vf)", False)
    ]
    assert list(tell_health({}, before)) == []


def test_another_reason_is_told_and_a_unit_without_a_device_goes_by_its_own_name() -> None:
    before = {"rdma/vf": [Offered("", unhealthy("LinkDown"))]}
    after = {"rdma/vf": [Offered("", unhealthy("Quarantined"))]}
    assert list(tell_health(before, after)) == [("unit-", "Quarantined (rdma/vf)", True)]


def test_the_same_again_is_counted_until_some_time_has_passed() -> None:
    clock = Clock()
    events = Events(clock)
    for _ in range(3):
        clock.now += 1
        events.reconciled("detach-failed", "DeviceBusy")
    (event,) = events.listed()
    assert (event.count, event.at, event.warning, event.number) == (3, 1003.0, True, 3)
    clock.now += SAME_SECONDS
    events.reconciled("detach-failed", "DeviceBusy")
    assert [e.count for e in events.listed()] == [1, 3]
    assert events.noted == 4


def test_the_list_and_each_text_have_an_end() -> None:
    events = Events(most=3)
    for number in range(10):
        events.note("agent", str(number), "x" * 10_000)
    assert [event.subject for event in events.listed()] == ["9", "8", "7"]
    assert {len(event.text) for event in events.listed()} == {MOST_TEXT}


def test_obstacles_are_events_when_they_change() -> None:
    events = Events()
    obstacles = Obstacles(events.obstacle)
    obstacles.set("ledger", "disk full")
    obstacles.set("ledger", "disk full")
    obstacles.set("ledger", None)
    obstacles.set("ledger", None)
    assert lines(events) == [("agent", "ledger", "disk full"), ("agent", "ledger", "no longer in the way")]
