from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agent.cluster.topology.leaf_listener import MAX_SPEAKERS, SETTLE_SECONDS, Neighbours
from agent.hardware.lldp import Neighbour

A, B = Neighbour("aa", "1", "leaf-a"), Neighbour("bb", "1", "leaf-b")
NIC = "0000:3b:00.0"


def settled(neighbour: Neighbour, until: float = 0.0) -> Neighbours:
    """Make a book in which a neighbour is known, and was heard last at `until`."""
    book = Neighbours()
    for second in (-3, -2, -1, 0):
        book.heard(NIC, neighbour, 120, until + second * SETTLE_SECONDS / 3)
    assert book.at(NIC) == neighbour
    return book


def test_the_first_neighbour_is_believed_once_it_has_been_alone_for_a_while_and_stays_when_it_goes_silent() -> None:
    book = Neighbours()
    assert not book.heard(NIC, A, 0, -SETTLE_SECONDS), "it says that it goes away"
    for second in (0, 30, 60):
        assert not book.heard(NIC, A, 120, float(second))
        assert book.at(NIC) is None
    assert book.heard(NIC, A, 120, SETTLE_SECONDS)
    assert not book.heard(NIC, A, 120, SETTLE_SECONDS + 30)
    assert not book.heard(NIC, A, 0, SETTLE_SECONDS + 60)
    assert book.at(NIC) == A
    assert book.at("0000:5e:00.0") is None


def test_who_speaks_first_after_a_start_does_not_win_over_who_is_heard_after_it() -> None:
    book = Neighbours()
    book.heard(NIC, B, 120, 0.0)
    for second in (10, 40, 70):
        assert not book.heard(NIC, A, 120, float(second))
    assert book.at(NIC) is None
    assert book.heard(NIC, A, 120, 10 + SETTLE_SECONDS)
    assert book.at(NIC) == A


def test_another_one_is_believed_when_it_has_been_alone_for_a_while() -> None:
    book = settled(A)
    assert not book.heard(NIC, B, 120, 30.0)
    assert not book.heard(NIC, B, 120, 29.0 + SETTLE_SECONDS)
    assert book.contested(29.0 + SETTLE_SECONDS) == {}
    assert book.heard(NIC, B, 120, 30.0 + SETTLE_SECONDS)
    assert book.at(NIC) == B


def test_of_two_that_speak_on_one_link_the_known_one_stays() -> None:
    book = settled(A)
    for second in range(0, 3600, 30):
        assert not book.heard(NIC, B, 120, float(second))
        assert not book.heard(NIC, A, 120, float(second) + 15)
    assert book.at(NIC) == A
    assert book.contested(3600.0) == {NIC: (B, A)}
    assert book.contested(3600.0 + SETTLE_SECONDS) == {}


def test_of_two_that_speak_on_one_link_from_the_start_none_is_believed_until_one_is_alone() -> None:
    book = Neighbours()
    assert not book.heard(NIC, A, 120, 0.0)
    assert not book.heard(NIC, B, 120, 1.0)
    assert book.contested(2.0) == {}  # as when a cable was moved
    for second in range(30, 3600, 30):
        assert not book.heard(NIC, A, 120, float(second))
        assert book.contested(float(second))
        assert not book.heard(NIC, B, 120, float(second) + 1)
    assert book.at(NIC) is None
    for second in range(3600, 3600 + 60, 30):
        assert not book.heard(NIC, A, 120, float(second))
    assert book.heard(NIC, A, 120, 3571 + SETTLE_SECONDS)
    assert book.contested(3571 + SETTLE_SECONDS) == {}


def test_one_that_calls_itself_something_else_each_time_is_told_and_never_believed() -> None:
    book = settled(A)
    for second in range(1000):
        assert not book.heard(NIC, Neighbour(f"{second:x}", "1"), 120, float(second))
    assert book.at(NIC) == A
    assert len(book.contested(1000.0)[NIC]) == MAX_SPEAKERS


def test_after_a_disturbance_another_one_must_be_alone_from_anew() -> None:
    book = settled(A)
    book.disturbed(NIC)
    book.disturbed("0000:5e:00.0")
    book.heard(NIC, B, 120, 30.0)
    book.disturbed(NIC)
    assert not book.heard(NIC, B, 120, 30.0 + SETTLE_SECONDS)
    assert book.at(NIC) == A
    assert book.heard(NIC, B, 120, 30.0 + 2 * SETTLE_SECONDS)


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.floats(0, 60)), max_size=40))
def test_a_neighbour_never_changes_twice_within_the_time_to_settle(frames: list[tuple[Neighbour, float]]) -> None:
    book, now, changes = Neighbours(), 0.0, [0.0]
    for neighbour, pause in frames:
        now += pause
        if book.heard(NIC, neighbour, 120, now):
            changes.append(now)
    assert all(later - earlier >= SETTLE_SECONDS for earlier, later in pairwise(changes))
