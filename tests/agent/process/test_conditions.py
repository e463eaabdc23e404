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


def test_what_the_agent_hears_of_late_makes_nothing_unready() -> None:
    conditions = Conditions()
    for name in ("starting", "kubelet"):
        conditions.set(name, None)
    heard_late = dict.fromkeys(("kernel-events", "gpu-events", "cdi", "podresources", "runtime"), "away")
    for name, what in heard_late.items():
        conditions.set(name, what)
    assert conditions.first(besides=NO_POD_NEEDS) is None
    assert conditions.known() == heard_late
    conditions.set("ledger", "disk full")
    assert conditions.first(besides=NO_POD_NEEDS) == "ledger: disk full"
    assert conditions.known() == heard_late


def test_what_keeps_claims_from_their_pods_keeps_no_other_pod_from_its_network() -> None:
    conditions = Conditions()
    for name in ("starting", "kubelet"):
        conditions.set(name, None)
    of_the_cluster = {"slices": "the API server is away", "dra-features": "taints are dropped"}
    for name, what in of_the_cluster.items():
        conditions.set(name, what)
    assert conditions.first(besides=NO_POD_NEEDS) is None
    assert conditions.known() == of_the_cluster
    conditions.set("dra", "kubelet has not found the driver")
    assert conditions.first(besides=NO_ADD_NEEDS) is None
    assert conditions.first(besides=NO_POD_NEEDS) == "dra: kubelet has not found the driver"
