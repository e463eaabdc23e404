"""Recent events: what is told of units, attachments, health and conditions, and that the list has an end."""

from __future__ import annotations

from pathlib import Path

from agent.model.allocation import ClaimState
from agent.model.health import HEALTHY, Health, unhealthy
from agent.offer.offer import Unit, Units
from agent.process.conditions import Conditions
from agent.report.events import MOST_TEXT, SAME_SECONDS, Events
from tests.node import POD, VF, attach, granted, open_books, owner, prepare


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def offered(device: str, health: Health = HEALTHY) -> Unit:
    """Make one unit of rdma/vf."""
    return Unit(f"unit-{device}", "rdma/vf", "vf", device, health, 0)


def lines(events: Events) -> list[tuple[str, str, str]]:
    """Oldest first."""
    return [(e.kind, e.subject, e.text) for e in reversed(events.listed())]


def told(before: Units, after: Units) -> list[tuple[str, str, bool]]:
    events = Events()
    events.units_changed(before, after)
    return [(event.subject, event.text, event.warning) for event in events.listed()]


def test_the_life_of_a_vf_is_told_by_the_books(tmp_path: Path) -> None:
    events = Events()
    with open_books(tmp_path) as books:
        books.watch_holds(events.hold_changed)
        books.watch_attachments(events.attachment_changed)
        books.grant(granted("rdma/vf", {"unit-1": VF}))
        row = attach(books, VF, owner("c1", "net1"))
        books.finish_attach([row.attachment_id], {})
        books.bind(["unit-1"], POD)
        books.bind(["unit-1"], POD)
        books.begin_detach([row.attachment_id])
        books.finish_detach(row)
        books.release(["unit-1"])
        books.release(["unit-1"])
        books.finish_detach(attach(books, VF, owner("c2", "net1")))
    assert lines(events) == [
        ("grant", VF, "granted to a pod not known yet (rdma/vf)"),
        ("attach", VF, "is net1 of default/trainer"),
        ("grant", VF, "granted to default/trainer (rdma/vf)"),
        ("detach", VF, "net1 of default/trainer is back in the host"),
        ("release", VF, "no longer granted to default/trainer (rdma/vf)"),
        ("detach", VF, "did not become net1 of default/trainer"),
    ]
    assert [event.warning for event in events.listed()] == [True, *[False] * 5]


def test_many_units_that_fail_together_are_one_event() -> None:
    names = [f"0000:3b:00.{n}" for n in range(5)]
    before = {"rdma/vf": [offered(name) for name in names]}
    down = {"rdma/vf": [offered(name, unhealthy("LinkDown")) for name in names[:4]] + [offered(names[4])]}
    assert told(before, down) == [("0000:3b:00.0 and 3 more", "LinkDown (rdma/vf)", True)]
    assert told(down, before) == [("0000:3b:00.0 and 3 more", "healthy again, was LinkDown (rdma/vf)", False)]
    assert told(down, down) == []


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


def test_conditions_are_events_when_they_change() -> None:
    events = Events()
    conditions = Conditions(events.condition)
    conditions.set("ledger", "disk full")
    conditions.set("ledger", "disk full")
    conditions.set("ledger", None)
    conditions.set("ledger", None)
    assert lines(events) == [("agent", "ledger", "disk full"), ("agent", "ledger", "no longer in the way")]


def test_the_life_of_a_claim_is_told_and_the_same_failure_once_until_something_changes(tmp_path: Path) -> None:
    clock = Clock()
    events = Events(clock)
    with open_books(tmp_path) as books:
        books.watch_claims(events.claim_changed)
        made = prepare(books)
        for _ in range(3):
            events.claim_failed(made.ref, "not unprepared: the pod lives")
            events.note("agent", "between", str(clock.now))
            clock.now += 90.0
        books.set_claim_state(made.ref.uid, ClaimState.UNPREPARING)
        books.remove_claim(made.ref.uid)
        events.claim_failed(made.ref, "not unprepared: the pod lives")
    assert [(e.text, e.warning) for e in reversed(events.listed()) if e.kind == "claim"] == [
        (f"prepared for default/trainer: {VF} (rdma/vf)", False),
        ("not unprepared: the pod lives", True),
        (f"unprepared: {VF} (rdma/vf)", False),
        ("not unprepared: the pod lives", True),
    ]
