"""Somebody updates the agent while it works on a call that takes long."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import pytest

from hack.sim.stage import Stage, wait
from tests.e2e.conftest import stage as stage  # the fixture
from tests.e2e.test_ipam import ANSWER, Runtime
from tests.e2e.test_ipam import runtime as runtime  # the fixture
from tests.hostile.updating import Agents

LATE_SECONDS = 0.3
"""How much later than its lock an ended process may be seen to have ended."""


@pytest.mark.parametrize("seconds", [3, 30])
def test_the_next_agent_begins_when_the_last_one_can_touch_no_device_any_more(
    runtime: Runtime, stage: Stage, seconds: int
) -> None:
    """Its threads cannot be stopped: what one does with a device that the next agent heals is undone by nobody."""
    slow = runtime.plugin(f"touch $here/asked; sleep {seconds}; echo '{ANSWER}'")
    agents, last = Agents(stage), stage.processes["agent"]
    waiting = agents.start()
    wait("the next agent to wait", lambda: "standing by" in stage.log(waiting) or None)
    adding = threading.Thread(target=runtime.call, args=("ADD", "s1", slow))
    adding.start()
    try:
        wait("the plugin to be asked", lambda: Path(stage.folder, "asked").exists() or None)
        last.send_signal(signal.SIGTERM)
        wait("the next agent to take over", lambda: "taking over" in stage.log(waiting) or None)
        try:
            last.wait(timeout=LATE_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail("the next agent took over while the last one still worked on the ADD")
        wait("the next agent to serve", lambda: "registered with kubelet" in stage.log(waiting) or None)
        assert "calls are still worked on" in stage.log("agent")
    finally:
        runtime.call("DEL", "s1", slow)
        adding.join()
