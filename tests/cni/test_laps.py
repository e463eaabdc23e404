"""The stop-watch of a call."""

from __future__ import annotations

import pytest

from cni.laps import Laps


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    ticks = iter((10.0, 10.5, 12.0))
    laps = Laps(lambda: next(ticks))
    laps.end("plan")
    laps.end("device")
    assert laps.taken == pytest.approx({"plan": 0.5, "device": 1.5})


def test_a_step_that_comes_again_adds_up() -> None:
    ticks = iter((0.0, 1.0, 3.0, 6.0))
    laps = Laps(lambda: next(ticks))
    for step in ("books", "device", "books"):
        laps.end(step)
    assert laps.taken == pytest.approx({"books": 4, "device": 2})
