"""The agent is killed at some of the steps that change something, and others; `make soak` takes all of the former."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.soak import crash
from tests.soak.crash import CrashTest, Limits
from tests.soak.points import Point
from tests.soak.scenarios import SCENARIOS

SEED = 1
"""The same selection in each run: what fails is due to the change that is tested."""
POINTS = 30
"""So many of each part, however slow the machine is: that is less than a minute."""
PARTS = 3


@pytest.mark.usefixtures("own_network")
@pytest.mark.parametrize("part", range(PARTS))
def test_an_agent_killed_at_any_step_loses_nothing(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = crash.run(SEED, Limits(others=10, most=POINTS), scenarios=SCENARIOS[part::PARTS])
    with capsys.disabled():
        print(f"\ncrash test, seed {SEED}, part {part}: {outcome}")
    assert outcome.violations == []
    assert outcome.points == POINTS
    assert outcome.missed < outcome.points / 2  # threads go another way on a busy machine


@pytest.mark.usefixtures("own_network")
def test_the_points_are_those_of_the_code_that_runs_and_between_each_of_its_steps() -> None:
    test = CrashTest()
    named = {scenario.name: scenario for scenario in SCENARIOS}
    try:
        add, prepare, unprepare = (
            test.find_points(named[name])
            for name in ("ADD with settings and addresses", "Prepare of a claim", "Unprepare of a claim")
        )
    finally:
        test.close()
    assert test.outcome.violations == []
    assert {"cni/server.py", "cni/protocol.py", "cni/ipam/plugins.py", "agent/hardware/netlink/links.py"} <= files(add)
    assert not {
        file for file in files(add) if file.startswith(("hack/sim/", "tests/")) and file != "hack/sim/machine.py"
    }
    mine = {f"deviceplugin/dra/{name}.py" for name in ("preparer", "planner", "allocated_claim", "parameters")}
    assert mine | {"agent/ledger/holds.py", "agent/edits/claim_metadata.py"} <= files(prepare)
    assert {"execute", "send", "rename", "fork_exec"} <= changes(add)
    assert {"execute", "rename"} <= changes(prepare)
    assert {"execute", "unlink"} <= changes(unprepare)


def files(points: Iterable[Point]) -> set[str]:
    return {point.where.partition(":")[0] for point in points}


def changes(points: Iterable[Point]) -> set[str]:
    return {point.where.rpartition(" ")[2] for point in points if point.after_change}
