from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.device import Gpu, MigDevice
from agent.model.device_health import (
    APPLICATION,
    EVERY_XID,
    FATAL,
    INFORMATION,
    NO_INSTANCE,
    NO_TROUBLES,
    QUIET_SECONDS,
    TRANSIENT,
    WITHHOLDING,
    Course,
    GpuEvent,
    GpuPolicy,
    Patience,
    XidClass,
    begun,
    judge_gpu,
    next_recovery,
    slice_of,
    step,
)
from agent.model.health import HEALTHY, Health, Reason, unhealthy

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


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(0, LINK)], [LINK]),
        ([(0, HEALTHY), (1, DRIVER), (1.1, HEALTHY)], [HEALTHY, DRIVER, HEALTHY]),
        ([(0, HEALTHY), (10, LINK), (11.9, LINK), (11.95, HEALTHY), (30, HEALTHY)], [HEALTHY] * 5),
        ([(0, HEALTHY), (10, LINK), (11.9, LINK), (12, LINK)], [HEALTHY, HEALTHY, HEALTHY, LINK]),
        ([(0, LINK), (1, HEALTHY), (5.9, HEALTHY), (6, HEALTHY)], [LINK, LINK, LINK, HEALTHY]),
        ([(0, LINK), (1, HEALTHY), (4, LINK), (5, HEALTHY), (9, HEALTHY)], [LINK] * 5),
        ([(second, LINK if second % 2 else HEALTHY) for second in range(8)], [HEALTHY] * 3 + [LINK] * 5),
        (
            [(0, HEALTHY), (10, LINK), (11, HEALTHY), (20, LINK), (21, HEALTHY), (30, LINK), (31.5, LINK)],
            [HEALTHY] * 7,
        ),
        ([(0, HEALTHY), (1, LINK), (1.1, DRIVER)], [HEALTHY, HEALTHY, DRIVER]),
        ([(0, DRIVER), (1, PORT), (2, LINK), (3, HEALTHY)], [DRIVER, PORT, LINK, LINK]),
    ],
    ids=[
        "what is seen first counts",
        "a hard fault counts, and ends, at once",
        "a short flap passes",
        "a link that stays down counts after its time",
        "a link is up again when it has lasted",
        "a link that comes up for a moment stays down",
        "flaps without end are an outage",
        "flaps far apart do not add up",
        "a graver reason during a flap counts at once",
        "a reason takes the place of one that counts",
    ],
)
def test_links_count_when_they_have_lasted_and_all_else_at_once(
    looks: Sequence[tuple[float, Health]], expected: list[Health]
) -> None:
    assert shown(*looks) == expected
    assert shown((0.0, HEALTHY), (1.0, LINK), (1.0, HEALTHY), patience=Patience()) == [HEALTHY, LINK, HEALTHY]


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


SLICES = tuple(
    MigDevice(f"MIG-{n}", "1g.10gb", *place, 1) for n, place in (("7", (7, 0)), ("8", (8, 0)), ("8b", (8, 1)))
)
GPU = Gpu("GPU-a", 0, 0, "0000:1b:00.0", "H100", 1, mig_mode=True, mig_devices=SLICES)
OTHER = replace(GPU, uuid="GPU-b", mig_devices=())
NOW = 1000.0


def event(xid: int, at: float = NOW, gpu: str = "GPU-a", mig: str = "", enumeration: int = 0) -> GpuEvent:
    return GpuEvent(xid, at, gpu, mig, enumeration)


def test_a_fatal_error_counts_until_the_gpu_was_found_anew() -> None:
    troubles = NO_TROUBLES.noted(event(79))
    assert judge_gpu(GPU, troubles, NOW + 1e9) == unhealthy("XidFatal")
    assert judge_gpu(replace(GPU, enumeration=1), troubles, NOW) == HEALTHY
    again = troubles.noted(event(79, enumeration=1))
    assert judge_gpu(replace(GPU, enumeration=1), again, NOW) == unhealthy("XidFatal")


def test_a_transient_error_does_not_hide_a_fatal_one_until_a_reset_is_between_them() -> None:
    both = NO_TROUBLES.noted(event(79)).noted(event(74, NOW + 1))
    assert judge_gpu(GPU, both, NOW + 1) == unhealthy("XidFatal")
    after = both.noted(event(74, NOW + 2, enumeration=1))
    assert judge_gpu(replace(GPU, enumeration=1), after, NOW + 2) == unhealthy("XidTransient")


def test_an_error_concerns_no_other_gpu_and_one_without_a_gpu_none() -> None:
    assert judge_gpu(OTHER, NO_TROUBLES.noted(event(79)), NOW) == HEALTHY
    assert NO_TROUBLES.noted(event(79, gpu="")) is NO_TROUBLES


def test_slices_have_their_gpus_errors_and_the_gpu_has_none_of_a_slice() -> None:
    of_gpu = NO_TROUBLES.noted(event(79))
    assert judge_gpu(GPU, of_gpu, NOW, mig_uuid="MIG-7") == unhealthy("XidFatal")
    of_slice = NO_TROUBLES.noted(event(48, mig="MIG-7"))
    assert judge_gpu(GPU, of_slice, NOW, mig_uuid="MIG-7") == unhealthy("XidFatal")
    assert judge_gpu(GPU, of_slice, NOW, mig_uuid="MIG-8") == HEALTHY
    assert judge_gpu(GPU, of_slice, NOW) == HEALTHY
    assert judge_gpu(replace(GPU, enumeration=1), of_slice, NOW, mig_uuid="MIG-7") == HEALTHY


@pytest.mark.parametrize(
    ("gpu_instance", "compute_instance", "expected"),
    [
        (NO_INSTANCE, NO_INSTANCE, ""),
        (7, 0, "MIG-7"),
        (7, NO_INSTANCE, "MIG-7"),
        (9, 0, ""),
        (7, 3, ""),
        (8, NO_INSTANCE, ""),
    ],
)
def test_an_events_instances_name_a_slice_or_else_the_whole_gpu(
    gpu_instance: int, compute_instance: int, expected: str
) -> None:
    assert slice_of(GPU, gpu_instance, compute_instance) == expected


@pytest.mark.parametrize("word", WITHHOLDING)
def test_what_a_reading_shows_withholds_a_gpu_with_its_slices_while_it_shows_it(word: str) -> None:
    ill = replace(GPU, ailments=(word, "RowRemapPending"))
    assert judge_gpu(ill) == judge_gpu(ill, mig_uuid="MIG-7") == unhealthy(word)
    assert judge_gpu(GPU) == HEALTHY


@pytest.mark.parametrize("word", ["RowRemapPending", "PageRetirementPending", "InforomCorrupted"])
def test_what_is_only_noted_leaves_a_gpu_healthy(word: str) -> None:
    assert judge_gpu(replace(GPU, ailments=(word,))) == HEALTHY


@pytest.mark.parametrize(
    ("policy", "xid", "expected"),
    [
        (GpuPolicy(ignored_xids=frozenset({79})), 79, APPLICATION),
        (GpuPolicy(ignored_xids=frozenset({79})), 48, FATAL),
        (GpuPolicy(ignored_xids=frozenset({EVERY_XID})), 48, APPLICATION),
        (GpuPolicy(ignored_xids=frozenset({EVERY_XID}), fatal_xids=frozenset({48})), 48, FATAL),
        (GpuPolicy(fatal_xids=frozenset({31})), 31, FATAL),
        (GpuPolicy(fatal_xids=frozenset({EVERY_XID}), ignored_xids=frozenset({31})), 31, APPLICATION),
        (GpuPolicy(fatal_xids=frozenset({EVERY_XID}), ignored_xids=frozenset({EVERY_XID})), 31, FATAL),
        (GpuPolicy(), 63, INFORMATION),
        (GpuPolicy(), 74, TRANSIENT),
    ],
)
def test_the_configuration_decides_before_the_table(policy: GpuPolicy, xid: int, expected: XidClass) -> None:
    assert policy.classify(xid) is expected


@pytest.mark.parametrize(
    ("xid", "before", "after", "reason"),
    [
        (79, GpuPolicy(), GpuPolicy(ignored_xids=frozenset({79})), ""),
        (74, GpuPolicy(), GpuPolicy(ignored_xids=frozenset({EVERY_XID})), ""),
        (74, GpuPolicy(fatal_xids=frozenset({74})), GpuPolicy(), "XidTransient"),
        (74, GpuPolicy(), GpuPolicy(fatal_xids=frozenset({74})), "XidTransient"),
    ],
    ids=["excused", "all excused", "no longer fatal", "fatal from the next one on"],
)
def test_another_policy_may_excuse_an_error_and_makes_nothing_graver_of_it(
    xid: int, before: GpuPolicy, after: GpuPolicy, reason: str
) -> None:
    troubles = NO_TROUBLES.noted(event(xid), before)
    assert judge_gpu(GPU, troubles, NOW + 1, after).reason == reason
    assert (next_recovery(troubles, NOW + 1, after) is not None) == (reason == "XidTransient")
    assert judge_gpu(GPU, troubles, NOW + QUIET_SECONDS, after) == HEALTHY
