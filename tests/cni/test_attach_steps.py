"""How long the steps of an ADD take."""

from __future__ import annotations

import pytest

from cni.attach import StepTimer


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    ticks = iter((10.0, 10.5, 12.0))
    timer = StepTimer(lambda: next(ticks))
    timer.end("plan")
    timer.end("device")
    assert timer.taken == pytest.approx({"plan": 0.5, "device": 1.5})


def test_a_step_that_comes_again_adds_up() -> None:
    ticks = iter((0.0, 1.0, 3.0, 6.0))
    timer = StepTimer(lambda: next(ticks))
    for step in ("books", "device", "books"):
        timer.end(step)
    assert timer.taken == pytest.approx({"books": 4, "device": 2})
