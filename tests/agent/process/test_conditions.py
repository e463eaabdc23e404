"""What keeps the agent from its work: when it counts, and when it is said."""

from __future__ import annotations

import logging

import pytest

from agent.process.conditions import NO_ADD_NEEDS, NO_POD_NEEDS, Conditions

AWAY = "has no open stream for rdma/vf"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_goes_by_itself_counts_at_once_and_is_an_error_only_when_it_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, told = Clock(), list[tuple[str, str | None]]()
    conditions = Conditions(lambda name, what: told.append((name, what)), clock)
    conditions.expect("kubelet", AWAY, 5)
    clock.now += 4.9
    conditions.expect("kubelet", AWAY, 5)
    assert conditions.found["kubelet"] == AWAY
    assert (told, caplog.records) == ([], [])
    clock.now += 0.2
    conditions.expect("kubelet", AWAY, 5)
    conditions.expect("kubelet", AWAY, 5)
    assert told == [("kubelet", AWAY)]
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.ERROR, f"kubelet: {AWAY}")]
    conditions.expect("kubelet", None, 5)
    assert told[1:] == [("kubelet", None)]
    assert "kubelet" not in conditions.found


def test_what_came_and_went_in_time_was_never_said() -> None:
    clock, told = Clock(), list[tuple[str, str | None]]()
    conditions = Conditions(lambda name, what: told.append((name, what)), clock)
    conditions.set("kubelet", None)
    told.clear()
    for _ in range(3):  # each time anew
        conditions.expect("kubelet", AWAY, 5)
        clock.now += 4
        conditions.expect("kubelet", None, 5)
    assert told == []


@pytest.mark.parametrize(
    ("name", "is_ready", "serves_adds"),
    [
        *((name, True, True) for name in ("kernel-events", "gpu-events", "cdi", "podresources", "runtime")),
        *((name, True, True) for name in ("slices", "dra-features", "publishing", "healing", "config")),
        *((name, False, True) for name in ("dra", "kubelet", "endpoints", "admin")),
        *((name, False, False) for name in ("ledger", "hardware", "cni")),
    ],
)
def test_a_condition_makes_unready_what_it_keeps_from_its_work(name: str, is_ready: bool, serves_adds: bool) -> None:
    conditions = Conditions()
    conditions.set("starting", None)
    conditions.set("kubelet", None)
    conditions.set(name, "away")
    said = f"{name}: away"
    assert conditions.first(besides=NO_POD_NEEDS) == (None if is_ready else said)
    assert conditions.first(besides=NO_ADD_NEEDS) == (None if serves_adds else said)
    assert conditions.known() == ({name: "away"} if is_ready else {})
