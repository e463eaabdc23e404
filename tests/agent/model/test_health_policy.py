from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agent.model.health import HEALTHY, Health, Reason, unhealthy
from agent.model.health_policy import Course, Patience, begun, step

PATIENCE = Patience(down_seconds=2.0, up_seconds=5.0)
LINK = unhealthy(Reason.LINK_DOWN)
PORT = unhealthy(Reason.PORT_DOWN)
DRIVER = unhealthy(Reason.NO_DRIVER)


def shown(*looks: tuple[float, Health], patience: Patience = PATIENCE) -> list[Health]:
    """Take looks at a device, each at its time, and list what counted after each."""
    course: Course | None = None
    seen = []
    for now, raw in looks:
        course = begun(raw, now) if course is None else step(course, raw, now, patience)
        seen.append(course.shown)
    return seen


def test_a_device_seen_for_the_first_time_is_taken_as_it_is() -> None:
    assert shown((0, LINK)) == [LINK]
    assert shown((0, HEALTHY)) == [HEALTHY]


def test_a_hard_fault_counts_at_once_and_ends_at_once() -> None:
    assert shown((0, HEALTHY), (1, DRIVER), (1.1, HEALTHY)) == [HEALTHY, DRIVER, HEALTHY]


def test_a_short_flap_of_the_link_passes() -> None:
    assert shown((0, HEALTHY), (10, LINK), (11.9, LINK), (11.95, HEALTHY), (30, HEALTHY)) == [HEALTHY] * 5


def test_a_link_that_stays_down_counts_after_its_time() -> None:
    assert shown((0, HEALTHY), (10, LINK), (11.9, LINK), (12, LINK)) == [HEALTHY, HEALTHY, HEALTHY, LINK]


def test_a_link_is_up_again_when_it_has_lasted() -> None:
    looks = [(0, LINK), (1, HEALTHY), (5.9, HEALTHY), (6, HEALTHY)]
    assert shown(*looks) == [LINK, LINK, LINK, HEALTHY]


def test_a_link_that_comes_up_for_a_moment_only_stays_down() -> None:
    assert shown((0, LINK), (1, HEALTHY), (4, LINK), (5, HEALTHY), (9, HEALTHY)) == [LINK] * 5


def test_a_link_that_flaps_without_end_is_an_outage() -> None:
    looks = [(second, LINK if second % 2 else HEALTHY) for second in range(8)]
    assert shown(*looks) == [HEALTHY, HEALTHY, HEALTHY, LINK, LINK, LINK, LINK, LINK]


def test_flaps_far_apart_do_not_add_up() -> None:
    looks = [(0, HEALTHY), (10, LINK), (11, HEALTHY), (20, LINK), (21, HEALTHY), (30, LINK), (31.5, LINK)]
    assert shown(*looks) == [HEALTHY] * 7


def test_a_graver_reason_during_a_flap_counts_at_once() -> None:
    assert shown((0, HEALTHY), (1, LINK), (1.1, DRIVER)) == [HEALTHY, HEALTHY, DRIVER]


def test_another_reason_takes_the_place_of_one_that_counts() -> None:
    assert shown((0, DRIVER), (1, PORT), (2, LINK), (3, HEALTHY)) == [DRIVER, PORT, LINK, LINK]


def test_without_patience_everything_counts_at_once() -> None:
    looks = [(0.0, HEALTHY), (1.0, LINK), (1.0, HEALTHY)]
    assert shown(*looks, patience=Patience()) == [HEALTHY, LINK, HEALTHY]


RAW = st.sampled_from([HEALTHY, HEALTHY, LINK, PORT, DRIVER])
LOOKS = st.lists(st.tuples(st.floats(0.01, 8, allow_nan=False), RAW), min_size=1, max_size=30)


@given(LOOKS)
def test_looking_when_it_is_due_is_as_good_as_looking_all_the_time(changes: Sequence[tuple[float, Health]]) -> None:
    often: Course | None = None
    timed: Course | None = None
    now = 0.0
    for lasts, raw in changes:
        often = begun(raw, now) if often is None else step(often, raw, now, PATIENCE)
        timed = begun(raw, now) if timed is None else step(timed, raw, now, PATIENCE)
        end = now + lasts
        while (due := timed.due(PATIENCE)) is not None and due <= end:
            before = timed
            timed = step(timed, raw, max(due, now), PATIENCE)
            assert timed.shown != before.shown  # what is due happens, or a timer would spin
        for part in range(20):
            often = step(often, raw, now + lasts * part / 20, PATIENCE)
        often = step(often, raw, end, PATIENCE)
        assert often.shown == timed.shown
        now = end


@given(LOOKS)
def test_what_lasts_always_counts_in_the_end(changes: Sequence[tuple[float, Health]]) -> None:
    now, course = 0.0, begun(HEALTHY, 0.0)
    raw = HEALTHY
    for lasts, raw in changes:
        course = step(course, raw, now, PATIENCE)
        now += lasts
    course = step(course, raw, now + 10, PATIENCE)
    assert course.shown == raw
    assert course.due(PATIENCE) is None
