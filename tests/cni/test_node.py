"""One lock for each device: held alone, given up after a while, and forgotten when nobody wants it."""

from __future__ import annotations

import threading

import pytest

from agent.errors import DeviceBusy
from cni.call import DeviceLocks
from tests.waiting import until


def test_a_device_is_held_by_one_at_a_time_and_others_are_free() -> None:
    locks = DeviceLocks()
    with locks.hold(["a", "b"]):
        with pytest.raises(DeviceBusy, match="another call has been working on b for 0 s"), locks.hold(["b"], 0.0):
            pass
        with locks.hold(["c"], 0.0):
            pass
    with locks.hold(["b", "a", "b"], 0.0):
        pass


def test_what_nobody_wants_is_forgotten_and_what_somebody_waits_for_is_not() -> None:
    locks = DeviceLocks()
    for number in range(1000):
        with locks.hold([f"parent/container-{number}/net1"]):
            pass
    assert len(locks._locks) == 0
    order: list[str] = []
    with locks.hold(["a"]):
        waiting = threading.Thread(target=lambda: wait(locks, order))
        waiting.start()
        until(lambda: locks._locks["a"].by == 2)
        with pytest.raises(DeviceBusy), locks.hold(["a"], 0.0):
            pass
        order.append("first")
    waiting.join(20)
    assert order == ["first", "second"]
    assert len(locks._locks) == 0


def wait(locks: DeviceLocks, order: list[str]) -> None:
    with locks.hold(["a"]):
        order.append("second")


def test_many_threads_never_hold_the_same_device_together() -> None:
    locks, inside, worst = DeviceLocks(), [0], [0]

    def work() -> None:
        for _ in range(200):
            with locks.hold(["a", "b"]):
                inside[0] += 1
                worst[0] = max(worst[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (worst, inside, locks._locks) == ([1], [0], {})
