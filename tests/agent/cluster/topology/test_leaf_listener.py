from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cluster.topology.leaf_listener import MAX_SPEAKERS, SETTLE_SECONDS, Neighbours
from agent.hardware.lldp import Neighbour

A, B = Neighbour("aa", "1", "leaf-a"), Neighbour("bb", "1", "leaf-b")
NIC = "0000:3b:00.0"
Frame = tuple[float, Neighbour | None]
"""When, and who spoke; None: more spoke at once than could be read."""
BELIEVED: list[Frame] = [(-90, A), (-60, A), (-30, A), (0, A)]


def in_turn(start: int, end: int, *speakers: Neighbour) -> list[Frame]:
    """Have each speak once in half a minute."""
    return [(second + i, speaker) for second in range(start, end, 30) for i, speaker in enumerate(speakers)]


@pytest.mark.parametrize(
    ("frames", "changes", "contested"),
    [
        pytest.param([*BELIEVED, (30, A)], [0], 0, id="alone for a while"),
        pytest.param([(0, B), (10, A), (40, A), (70, A), (99, A), (100, A)], [100], 0, id="not who speaks first"),
        pytest.param([*BELIEVED, (30, B), (119, B), (120, B)], [0, 120], 0, id="another one, alone for a while"),
        pytest.param([*BELIEVED, *in_turn(1, 3600, B, A)], [0], 2, id="the known one of two in turn"),
        pytest.param([(0, A), (1, B)], [], 0, id="a cable that was moved"),
        pytest.param(in_turn(0, 3600, A, B), [], 2, id="none of two in turn"),
        pytest.param([*in_turn(0, 3600, A, B), *in_turn(3600, 3690, A), (3661, A)], [3661], 0, id="until one is alone"),
        pytest.param(
            [*BELIEVED, *((s, Neighbour(f"{s:x}", "1")) for s in range(1, 1000))],
            *([0], MAX_SPEAKERS),
            id="another name each time",
        ),
        pytest.param(
            [*BELIEVED, (1, None), (30, B), (31, None), (120, B), (210, B)],
            [0, 210],
            0,
            id="alone from anew after a flood",
        ),
    ],
)
def test_a_neighbour_is_believed_that_has_been_alone_for_a_while(
    frames: list[Frame], changes: list[float], contested: int
) -> None:
    book, seen = Neighbours(), []
    assert not book.heard(NIC, A, 0, -500), "it says that it goes away"
    for second, neighbour in frames:
        if neighbour is None:
            book.disturbed(NIC)
        elif book.heard(NIC, neighbour, 120, second):
            seen.append(second)
            assert book.at(NIC) == neighbour
    assert seen == changes
    last = frames[-1][0]
    assert len(book.contested(last).get(NIC, ())) == contested
    assert book.contested(last + SETTLE_SECONDS) == {}


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.floats(0, 60)), max_size=40))
def test_a_neighbour_never_changes_twice_within_the_time_to_settle(frames: list[tuple[Neighbour, float]]) -> None:
    book, now, changes = Neighbours(), 0.0, [0.0]
    for neighbour, pause in frames:
        now += pause
        if book.heard(NIC, neighbour, 120, now):
            changes.append(now)
    assert all(later - earlier >= SETTLE_SECONDS for earlier, later in pairwise(changes))
