"""Who may have a place where calls take long, and who is told to come again."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import DeviceBusy
from cni.places import Holder, Places, Rules, full_network

KINDS = ("ADD", "DEL")
WANTED = st.builds(Holder, st.sampled_from([*KINDS, "STATUS"]), st.sampled_from("abcde").map(lambda name: (name,)))


def taken(wishes: list[Holder], rules: Rules) -> list[Holder]:
    """Give places to whoever may have one, in order."""
    held: list[Holder] = []
    for wanted in wishes:
        if full_network(held, wanted, rules) is None:
            held.append(wanted)
    return held


@pytest.mark.parametrize(("total", "most"), [(1, 1), (2, 1), (4, 2), (96, 48)])
def test_one_network_alone_gets_half_of_the_places(total: int, most: int) -> None:
    assert len(taken([Holder("ADD", ("a",))] * 200, Rules(total))) == most


def test_each_further_network_gets_half_of_the_rest() -> None:
    wishes = [Holder("ADD", (name,)) for name in "abcdef" for _ in range(200)]
    held = taken(wishes, Rules(96))
    assert [held.count(Holder("ADD", (name,))) for name in "abcdef"] == [48, 24, 12, 6, 3, 2]


def test_networks_that_count_as_one_share_what_one_may_have() -> None:
    wishes = [Holder("ADD", (name,)) for name in "abc" for _ in range(200)]
    assert len(taken(wishes, Rules(96, together={"a", "b"}))) == 48 + 24


def test_a_call_for_several_networks_has_one_place_and_needs_room_in_each() -> None:
    rules = Rules(8)
    held = [Holder("ADD", ("a", "b"))] * 4
    assert full_network(held[:3], held[0], rules) is None
    assert full_network(held, Holder("ADD", ("c", "b")), rules) == "b"
    assert full_network(held, Holder("ADD", ("c", "d")), rules) is None


@given(st.lists(st.tuples(WANTED, st.integers(0, 9)), max_size=60), st.sets(st.sampled_from("abcde")))
def test_whoever_comes_and_goes_there_is_always_a_place_for_each_kind(
    moves: list[tuple[Holder, int]], together: set[str]
) -> None:
    """`a` to `e` come and go, or hang for ever."""
    rules = Rules(4, KINDS, together)
    held: list[Holder] = []
    for wanted, who in moves:
        if full_network(held, wanted, rules) is None:
            held.append(wanted)
        elif who < len(held):
            held.pop(who)
        assert len(held) <= rules.total
        for kind in KINDS:
            has_one = any(holder.kind == kind for holder in held)
            assert has_one or full_network(held, Holder(kind, ("new",)), rules) is None


def test_who_finds_no_place_is_told_of_which_network_there_are_how_many() -> None:
    places = Places("ADDs under way", Rules(4))
    with places.hold("ADD", "rails"), places.hold("ADD", "rails"), places.hold("ADD", "storage"):
        with pytest.raises(
            DeviceBusy, match=r"^network rails has 2 ADDs under way \(the node 3 of at most 4\), and .+"
        ):
            places.hold("ADD", "third", "rails").__enter__()
        with places.hold("ADD", "third"):
            pass
    for _ in range(8):  # a place is left, also by who fails
        with pytest.raises(KeyError), places.hold("ADD", "rails"), places.hold("ADD", "rails"):
            raise KeyError


def test_who_waits_gets_the_place_that_becomes_free() -> None:
    places, has = Places("ADDs under way", Rules(2)), threading.Event()

    def wait() -> None:
        with places.hold("ADD", "rails", seconds=30):
            has.set()

    waiting = threading.Thread(target=wait)
    with places.hold("ADD", "rails"):
        waiting.start()
        assert not has.wait(0.2)
        with pytest.raises(DeviceBusy, match=r"after 0\.1 s"):
            places.hold("ADD", "rails", seconds=0.1).__enter__()
    assert has.wait(30)
    waiting.join()
