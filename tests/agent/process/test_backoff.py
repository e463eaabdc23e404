from __future__ import annotations

import pytest

from agent.process.backoff import Backoff, Retries


@pytest.mark.parametrize(
    ("failures", "asked", "chance", "pause"),
    [
        (0, None, 1.0, 0),
        (1, None, 0.0, 1),
        (2, None, 0.0, 2),
        (9, None, 0.0, 256),
        (10, None, 0.0, 300),
        (1000, None, 0.0, 300),
        (1, 30.0, 0.0, 30),
        (6, 30.0, 0.0, 32),
        (1, 1e9, 0.0, 300),
        (4, None, 0.5, 6),
        (4, None, 1.0, 4),
    ],
)
def test_a_pause_doubles_up_to_the_longest_and_a_server_may_ask_for_more(
    failures: int, asked: float | None, chance: float, pause: float
) -> None:
    assert Backoff(first=1, longest=300, jitter=0.5).after(failures, asked, chance) == pause


def test_a_clock_that_is_set_back_delays_nothing_for_longer_than_the_longest_pause() -> None:
    now = 1000.0
    retries = Retries(Backoff(first=2, longest=600), lambda: now)
    retries.failed("a")
    assert not retries.is_due("a")
    assert retries.next_due() == 2
    now = 10.0
    assert retries.is_due("a")
