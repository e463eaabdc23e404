"""The agent is killed at some of the steps that change something, and others; `make soak` takes all of the former."""

from __future__ import annotations

import pytest

from tests.soak import crash
from tests.soak.crash import CrashTest, Limits
from tests.soak.points import Point, distinct
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
def test_the_points_are_those_of_the_code_that_runs() -> None:
    test = CrashTest()
    try:
        points = test.find_points(next(s for s in SCENARIOS if s.name == "ADD with settings and addresses"))
    finally:
        test.close()
    files = {point.where.partition(":")[0] for point in points}
    assert {"cni/server.py", "cni/protocol.py", "cni/ipam/plugins.py", "agent/hardware/netlink/links.py"} <= files
    assert not {file for file in files if file.startswith(("hack/sim/", "tests/")) and file != "hack/sim/machine.py"}
    after = {point.where.rpartition(" ")[2] for point in points if point.after_change}
    assert {"execute", "send", "rename", "fork_exec"} <= after


@pytest.mark.usefixtures("own_network")
def test_the_points_of_claims_are_between_each_of_their_steps() -> None:
    test = CrashTest()
    named = {scenario.name: scenario for scenario in SCENARIOS}
    try:
        prepare, unprepare = (test.find_points(named[f"{call} of a claim"]) for call in ("Prepare", "Unprepare"))
    finally:
        test.close()
    assert test.outcome.violations == []
    files = {point.where.partition(":")[0] for point in prepare}
    mine = {f"deviceplugin/dra/{name}.py" for name in ("preparer", "planner", "allocated_claim", "parameters")}
    assert mine | {"agent/ledger/holds.py", "agent/edits/claim_metadata.py"} <= files
    assert {"execute", "rename"} <= {p.where.rpartition(" ")[2] for p in prepare if p.after_change}
    assert {"execute", "unlink"} <= {p.where.rpartition(" ")[2] for p in unprepare if p.after_change}


def test_all_points_after_a_change_are_chosen_and_as_many_others_as_told() -> None:
    one, two = SCENARIOS[:2]
    points = tuple(Point(number, f"f:{number}", number < 5, number < 5) for number in range(40))
    found = {one: points, two: points[:7]}
    crashes = crash.choose(found, Limits(others=10), seed=1)
    assert [c.point.number for c in crashes if c.scenario is one][:5] == [0, 1, 2, 3, 4]
    assert [sum(c.scenario is which for c in crashes) for which in (one, two)] == [15, 7]
    assert crash.choose(found, Limits(others=10), seed=1) == crashes
    some = crash.choose(found, Limits(others=10, most=8), seed=1)
    assert len(some) == 8
    assert {c.scenario for c in some} == {one, two}
    assert len(crash.choose(found, Limits(others=10, most=800), seed=1)) == 22


def test_a_line_that_is_executed_again_with_nothing_done_since_is_no_new_point() -> None:
    def point(number: int, where: str) -> Point:
        return Point(number, where, "after" in where, False)

    passed = ("a:1", "a:2", "a:1", "a:3 after send", "a:1", "a:1")
    points = tuple(point(number, where) for number, where in enumerate(passed))
    assert [p.number for p in distinct(points)] == [0, 1, 3, 4]
