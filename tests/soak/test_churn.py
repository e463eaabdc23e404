"""A short churn; `make soak` has the long one."""

from __future__ import annotations

import pytest

from tests.soak import churn

SEED = 1
"""The same course in each run, as far as threads go the same way."""


@pytest.mark.usefixtures("own_network")
def test_pods_that_come_and_go_over_crashes_of_the_agent_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    figures = churn.run(pods=60, vfs=16, concurrency=16, crash_every=20, seed=SEED, say=print)
    with capsys.disabled():
        print(f"\nchurn, seed {SEED}: {figures}")
    assert figures.failures == []
    assert figures.leaks == []
    assert figures.crashes >= 2
    assert figures.by_claim >= 10
    assert figures.attached == figures.pods == 60
