"""What is loaded before kubelet has the lists: until then it refuses pods, and nothing takes longer than imports."""

from __future__ import annotations

import json
import subprocess
import sys

STARTED = "agent.__main__, agent.hardware.machine, agent.inventory, agent.main, agent.process.startup"
LATER = {
    "pyroute2",
    "kubernetes",
    "urllib3",
    "agent.cluster.publications",
    "agent.report.doctor",
    "hack.sim",
    "cni.install.installation",
}


def test_a_start_loads_nothing_that_only_later_work_or_other_commands_need() -> None:
    code = f"import {STARTED}, json, sys; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not LATER & set(json.loads(done.stdout))


def test_an_agent_without_claims_loads_no_driver_for_them() -> None:
    code = f"import {STARTED}, deviceplugin.dra.driver, json, sys; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    there = {name for name in loaded if name.startswith(("deviceplugin.dra", "proto.dra", "kubernetes"))}
    assert there == {"deviceplugin.dra", "deviceplugin.dra.driver"}
    assert "agent.cluster.slices" not in loaded


def test_the_agents_own_command_still_has_its_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent", "run", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert done.startswith("usage: nodefabric run ")
    assert "--kubeconfig FILE" in done
