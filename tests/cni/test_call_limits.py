"""Who may have a place where calls take long, and who is told to come again."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import DeviceBusy
from cni.call import DeviceLocks
from cni.call_limits import NotWanted, Rules, Trust, Turn, Turns, too_many
from tests.waiting import soon, until

KINDS = ("ADD", "DEL")
WANTED = st.builds(
    Turn,
    st.sampled_from([*KINDS, "STATUS"]),
    st.sampled_from("abcde").map(lambda name: (name,)),
    st.sampled_from(["", "team", "other"]),
)


def taken(wishes: list[Turn], rules: Rules, trusted: str = "abcdef") -> list[Turn]:
    """Give turns to whoever may have one, in order."""
    held: list[Turn] = []
    for wanted in wishes:
        if too_many(held, wanted, rules, lambda name, _: str(name) in trusted) is None:
            held.append(wanted)
    return held


def test_each_further_network_gets_half_of_the_rest() -> None:
    wishes = [Turn("ADD", (name,)) for name in "abcdef" for _ in range(200)]
    held = taken(wishes, Rules(96))
    assert [held.count(Turn("ADD", (name,))) for name in "abcdef"] == [48, 24, 12, 6, 3, 2]


def test_one_namespace_gets_half_of_the_places_however_many_networks_it_has() -> None:
    wishes = [Turn("ADD", (name,), namespace) for namespace in ("one", "two") for name in "abcdef" for _ in range(20)]
    held = taken(wishes, Rules(32))
    assert [sum(holder.namespace == namespace for holder in held) for namespace in ("one", "two")] == [16, 8]


def test_networks_that_are_not_trusted_have_their_part_and_each_namespace_half_of_it() -> None:
    rules = Rules(5, KINDS, untrusted=2)
    wishes = [Turn("ADD", (f"fresh{n}",), namespace) for namespace in ("one", "two", "three") for n in range(50)]
    held = taken(wishes, rules)
    assert [holder.namespace for holder in held] == ["one", "two"]
    for namespace in ("one", "two", "three"):  # the others are for whoever is trusted
        assert too_many(held, Turn("ADD", ("a",), namespace), rules, lambda name, _: name == "a") is None
        assert too_many(held, Turn("DEL", ("a",), namespace), rules, lambda name, _: name == "a") is None


def test_a_network_whose_plugin_was_killed_is_trusted_again_once_it_answers() -> None:
    trust = Trust()
    assert not trust.has(("rails",), "team")
    for note, trusted in ((trust.note_answer, True), (trust.note_kill, False), (trust.note_answer, True)):
        note(("rails",), "team")
        assert trust.has(("rails",), "team") is trusted


def test_somebody_who_calls_a_network_as_another_namespace_does_takes_no_trust_from_that() -> None:
    trust = Trust()
    trust.note_answer(("rails",), "team")
    trust.note_kill(("rails",), "attacker")
    assert trust.has(("rails",), "team")
    trust.require(("rails",), "team")
    assert trust.is_refused(("rails",))


@given(st.lists(st.tuples(WANTED, st.integers(0, 9)), max_size=60), st.sets(st.sampled_from("abcde")))
def test_whoever_comes_and_goes_there_is_always_a_place_for_each_kind(
    moves: list[tuple[Turn, int]], trusted: set[str]
) -> None:
    """`a` to `e` come and go, or hang for ever."""
    rules, allowed = Rules(4, KINDS, untrusted=2), {*trusted, "new"}
    held: list[Turn] = []
    for wanted, who in moves:
        if too_many(held, wanted, rules, lambda name, _: name in allowed) is None:
            held.append(wanted)
        elif who < len(held):
            held.pop(who)
        assert len(held) <= rules.total
        for kind in KINDS:
            has_one = any(holder.kind == kind for holder in held)
            assert (
                has_one or too_many(held, Turn(kind, ("new",), "new"), rules, lambda name, _: name in allowed) is None
            )


def test_who_finds_no_place_is_told_of_which_network_there_are_how_many() -> None:
    turns = Turns("ADDs under way", Rules(4))
    with turns.hold("ADD", "rails"), turns.hold("ADD", "rails"), turns.hold("ADD", "storage"):
        with pytest.raises(
            DeviceBusy, match=r"^network rails has 2 ADDs under way \(the node 3 of at most 4\); the rest .+"
        ):
            turns.hold("ADD", "third", "rails").__enter__()
        with turns.hold("ADD", "third"):
            pass
    for _ in range(8):  # a place is left, also by who fails
        with pytest.raises(KeyError), turns.hold("ADD", "rails"), turns.hold("ADD", "rails"):
            raise KeyError


def test_who_waits_gets_the_place_that_becomes_free() -> None:
    turns, has = Turns("ADDs under way", Rules(2)), threading.Event()

    def wait() -> None:
        with turns.hold("ADD", "rails", seconds=30):
            has.set()

    waiting = threading.Thread(target=wait)
    with turns.hold("ADD", "rails"):
        waiting.start()
        assert not has.wait(0.2)
        with pytest.raises(DeviceBusy, match=r"after 0\.1 s"):
            turns.hold("ADD", "rails", seconds=0.1).__enter__()
    assert has.wait(30)
    waiting.join()


def test_who_is_not_waited_for_any_more_waits_no_longer() -> None:
    turns, is_wanted = Turns("ADDs under way", Rules(2)), threading.Event()
    is_wanted.set()
    with soon(0.2, is_wanted.clear), turns.hold("ADD", "rails"), pytest.raises(NotWanted):
        turns.hold("ADD", "rails", seconds=60, is_wanted=is_wanted.is_set).__enter__()


# ------------------------------------------------------------------------------- a lock for each device


def test_a_device_is_held_by_one_at_a_time_and_others_are_free() -> None:
    locks = DeviceLocks()
    with locks.hold(["a", "b"]):
        with pytest.raises(DeviceBusy, match="another call has been working on b for 0 s"), locks.hold(["b"], 0.0):
            pass
        with locks.hold(["c"], 0.0):
            pass
    with locks.hold(["b", "a", "b"], 0.0):
        pass


def test_who_waits_for_a_device_keeps_its_lock_from_being_forgotten() -> None:
    locks, order = DeviceLocks(), list[str]()

    def wait() -> None:
        with locks.hold(["a"]):
            order.append("second")

    with locks.hold(["a"]):
        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: locks._locks["a"].by == 2)
        order.append("first")
    waiting.join(20)
    assert (order, len(locks._locks)) == (["first", "second"], 0)
