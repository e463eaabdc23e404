from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agent.model.lldp import Neighbour
from agent.topology.neighbours import SETTLE_SECONDS, Neighbours

A, B = Neighbour("aa", "1", "leaf-a"), Neighbour("bb", "1", "leaf-b")
NIC = "0000:3b:00.0"


def test_the_first_neighbour_is_taken_at_once_and_stays_when_it_goes_silent() -> None:
    book = Neighbours()
    assert book.heard(NIC, A, 120, 0.0)
    assert not book.heard(NIC, A, 120, 30.0)
    assert not book.heard(NIC, A, 0, 60.0)
    assert book.at(NIC) == A
    assert book.at("0000:5e:00.0") is None


def test_another_one_is_believed_when_it_has_been_alone_for_a_while() -> None:
    book = Neighbours()
    book.heard(NIC, A, 120, 0.0)
    assert not book.heard(NIC, B, 120, 30.0)
    assert not book.heard(NIC, B, 120, 29.0 + SETTLE_SECONDS)
    assert book.heard(NIC, B, 120, 30.0 + SETTLE_SECONDS)
    assert book.at(NIC) == B


def test_of_two_that_speak_on_one_link_the_first_stays() -> None:
    book = Neighbours()
    book.heard(NIC, A, 120, 0.0)
    for second in range(0, 3600, 30):
        assert not book.heard(NIC, B, 120, float(second))
        assert not book.heard(NIC, A, 120, float(second) + 15)
    assert book.at(NIC) == A


def test_after_a_disturbance_another_one_must_be_alone_from_anew() -> None:
    book = Neighbours()
    book.disturbed(NIC)
    book.heard(NIC, A, 120, 0.0)
    book.heard(NIC, B, 120, 30.0)
    book.disturbed(NIC)
    assert not book.heard(NIC, B, 120, 30.0 + SETTLE_SECONDS)
    assert book.at(NIC) == A
    assert book.heard(NIC, B, 120, 30.0 + 2 * SETTLE_SECONDS)


def test_one_that_says_that_it_goes_away_is_no_neighbour() -> None:
    book = Neighbours()
    assert not book.heard(NIC, A, 0, 0.0)
    assert book.at(NIC) is None


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.floats(0, 60)), max_size=40))
def test_a_neighbour_never_changes_twice_within_the_time_to_settle(frames: list[tuple[Neighbour, float]]) -> None:
    book, now, changes = Neighbours(), 0.0, []
    for neighbour, pause in frames:
        now += pause
        if book.heard(NIC, neighbour, 120, now):
            changes.append(now)
    gaps = [later - earlier for earlier, later in pairwise(changes[1:])]
    assert all(gap >= SETTLE_SECONDS for gap in gaps)
