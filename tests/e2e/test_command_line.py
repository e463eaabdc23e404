"""The commands, as an operator runs them beside a running agent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hack.sim.stage import Stage

ROOT = Path(__file__).parents[2]


def nodefabric(stage: Stage, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "hack.sim.agent", *arguments, "--config", str(stage.folder / "config.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_status_events_and_doctor_tell_of_a_running_agent(node: Stage) -> None:
    node.run_pod("a", {"rdma/vf": 1, "nvidia.com/gpu": 1})
    status, shown = nodefabric(node, "status")
    assert status == 0
    assert "default/a" in shown
    status, shown = nodefabric(node, "events", "--output", "json")
    kinds = {event["kind"] for event in json.loads(shown)["events"]}
    assert {"grant", "attach", "agent"} <= kinds
    status, shown = nodefabric(node, "doctor", "--simulate", str(node.folder / "node"), "--output", "json")
    found = {finding["check"]: finding for finding in json.loads(shown)["findings"]}
    assert found["agent"]["severity"] == "fine"
    assert found["config"]["severity"] == "fine"
    assert found["gpus"]["text"].startswith("8 GPUs")
    assert (status == 0) == json.loads(shown)["sound"]
    node.end_pods("a")
