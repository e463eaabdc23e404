"""Whatever happens in whatever order, no device and no lease is lost; `make soak` plays longer, and anew each time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.soak.state_machine import Counted, life_on


@pytest.mark.usefixtures("own_network")
def test_no_order_of_events_loses_a_device_or_a_lease(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = Counted()
    chosen = settings(
        max_examples=10,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # what it finds is written in full; to shrink it takes minutes
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(life_on(nodes), settings=chosen)
    finally:
        nodes.close()
    with capsys.disabled():
        print(f"\nstate machine: {nodes.examples} examples, {nodes.steps} steps")
