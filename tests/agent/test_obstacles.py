"""What keeps the agent from its work: when it counts, and when it is said."""

from __future__ import annotations

import logging

import pytest

from agent.obstacles import NO_POD_NEEDS, Obstacles

AWAY = "has no open stream for rdma/vf"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_goes_by_itself_counts_at_once_and_is_an_error_only_when_it_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, told = Clock(), list[tuple[str, str | None]]()
    obstacles = Obstacles(lambda name, what: told.append((name, what)), clock)
    obstacles.expect("kubelet", AWAY, 5)
    clock.now += 4.9
    obstacles.expect("kubelet", AWAY, 5)
    assert obstacles.found["kubelet"] == AWAY
    assert (told, caplog.records) == ([], [])
    clock.now += 0.2
    obstacles.expect("kubelet", AWAY, 5)
    obstacles.expect("kubelet", AWAY, 5)
    assert told == [("kubelet", AWAY)]
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.ERROR, f"kubelet: {AWAY}")]
    obstacles.expect("kubelet", None, 5)
    assert told[1:] == [("kubelet", None)]
    assert "kubelet" not in obstacles.found


def test_what_came_and_went_in_time_was_never_said() -> None:
    clock, told = Clock(), list[tuple[str, str | None]]()
    obstacles = Obstacles(lambda name, what: told.append((name, what)), clock)
    obstacles.set("kubelet", None)
    told.clear()
    for _ in range(3):  # each time anew
        obstacles.expect("kubelet", AWAY, 5)
        clock.now += 4
        obstacles.expect("kubelet", None, 5)
    assert told == []


def test_what_the_agent_hears_of_late_makes_nothing_unready() -> None:
    obstacles = Obstacles()
    for name in ("starting", "kubelet"):
        obstacles.set(name, None)
    heard_late = dict.fromkeys(("kernel-events", "gpu-events", "cdi", "podresources", "runtime"), "away")
    for name, what in heard_late.items():
        obstacles.set(name, what)
    assert obstacles.first(besides=NO_POD_NEEDS) is None
    assert obstacles.known() == heard_late
    obstacles.set("ledger", "disk full")
    assert obstacles.first(besides=NO_POD_NEEDS) == "ledger: disk full"
    assert obstacles.known() == heard_late
