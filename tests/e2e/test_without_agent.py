"""Pods that have nothing of ours need no agent: it is stopped, killed, dies in a loop, or has a wrong configuration.

Pods that have a VF wait, and then start.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.sim.demo import not_back, still_attached
from hack.sim.stage import CONFIG, Stage, settled, wait
from tests.e2e.test_pods import noted

GATE = """\
#!/usr/bin/env python3
# A plugin of the chain that lets a pod's ADD go on when a file says so, and hands the result on.
import json, os, sys, time
document = json.load(sys.stdin)
gate = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "closed")
while os.environ["CNI_COMMAND"] == "ADD" and "K8S_POD_NAME=trainer" in os.environ["CNI_ARGS"] and os.path.exists(gate):
    time.sleep(0.01)
if os.environ["CNI_COMMAND"] == "ADD":
    print(json.dumps(document["prevResult"]))
"""


@pytest.fixture
def gated(stage: Stage) -> Stage:
    """A node on which pod `trainer` waits before our plugin, for as long as the file `closed` is there."""
    stage.build_node("h100-8gpu")
    gate = stage.folder / "cni/gate"
    gate.write_text(GATE)
    gate.chmod(0o755)
    cluster = {"type": "ptp", "ipam": stage.ipam("cluster", "10.244.0.0/24")}
    stage.run(conflist=[cluster, {"type": "gate"}, {"type": "nodefabric"}])
    return stage


def holders(stage: Stage) -> list[str] | None:
    """List the pods on file by name; None while somebody is unknown, or there is no file."""
    try:
        lines = (stage.folder / "run/cni.sock.pods").read_text().splitlines()
    except FileNotFoundError:
        return None
    return [line for line in lines[3:-1] if "/" in line] if lines[2] == "unknown 0" else None


def start_trainer(stage: Stage) -> None:
    """Have a pod admitted that holds a VF, and waits at the gate."""
    (stage.folder / "closed").touch()
    stage.create_pod("trainer", {"rdma/vf": 1})
    wait("the pod on file", lambda: holders(stage) == ["default/trainer"] or None)


def begin(stage: Stage, name: str = "plain") -> dict[str, Any]:
    return stage.run_pod(name, {"cpu": 1})


def interfaces(pod: dict[str, Any]) -> list[str]:
    return [each["name"] for each in pod["cni_result"]["interfaces"] if each.get("sandbox")]


def spooled(stage: Stage) -> list[Path]:
    folder = stage.folder / "state/spool"
    return list(folder.glob("*.del")) if folder.exists() else []


def status_of_network(stage: Stage) -> int:
    return stage.call("STATUS", {"name": "cluster"})[0]


def attached(stage: Stage) -> list[str]:
    return [f"{row['pod']} {row['state']}" for row in stage.status()["attachments"]]


def test_ordinary_pods_come_and_go_while_the_agent_hangs(node: Stage) -> None:
    wait("the file", lambda: holders(node) == [] or None)
    process = node.processes["agent"]
    process.send_signal(signal.SIGSTOP)
    try:
        assert interfaces(begin(node)) == ["eth0"]
        assert status_of_network(node) == 0
        node.end_pods("plain")
    finally:
        process.send_signal(signal.SIGCONT)
    assert spooled(node) == []


def test_a_pod_with_a_vf_waits_for_a_killed_agent_at_its_start_and_not_at_its_end_and_others_never(
    gated: Stage,
) -> None:
    before = gated.machine.links.by_device()
    start_trainer(gated)
    gated.end("agent", signal.SIGKILL)
    (gated.folder / "closed").unlink()
    assert interfaces(begin(gated)) == ["eth0"]
    assert status_of_network(gated) == 0
    gated.end_pods("plain")
    assert spooled(gated) == []
    trainer = gated.pod("trainer")
    assert trainer is not None
    assert trainer["phase"] == "Pending"
    gated.start_agent()
    assert interfaces(gated.await_pod("trainer")) == ["eth0", "net1"]
    gated.end("agent", signal.SIGKILL)
    gated.end_pods("trainer")
    assert spooled(gated) != []
    gated.start_agent()
    gated.await_ready()
    # The namespace took the simulated VF with it; the agent finds it under another name and heals it.
    assert settled(lambda: [*not_back(gated.machine, before), *still_attached(gated)]) == []
    assert spooled(gated) == []
    # Addresses come after all that pods wait for.
    assert settled(lambda: [str(path) for path in (gated.folder / "leases-rails/rails").glob("192.168.*")]) == []


@pytest.mark.parametrize("fresh", [False, True], ids=["after an agent that was well", "after a reboot"])
def test_a_wrong_configuration_stops_no_pod_that_has_nothing(gated: Stage, fresh: bool) -> None:
    gated.run_pod("former", {"rdma/vf": 1})
    wait("the pod on file", lambda: holders(gated) == ["default/former"] or None)
    start_second = {"rdma/vf": 1, "nvidia.com/gpu": 1}
    (gated.folder / "closed").touch()
    gated.create_pod("trainer", start_second)
    wait("both on file", lambda: holders(gated) == ["default/former", "default/trainer"] or None)
    wait("both resources to be given", lambda: len(noted(gated)) == 3 or None)
    gated.end("agent")
    if fresh:
        (gated.folder / "run/cni.sock.pods").unlink()
    document = yaml.safe_load((gated.folder / "config.yaml").read_text())
    wrong = {**document, "resources": [{**CONFIG["resources"][1], "network": "nosuch"}]}
    (gated.folder / "config.yaml").write_text(yaml.safe_dump(wrong))
    gated.start_agent()
    wait("a word about it", lambda: "'nosuch' is not among the networks" in gated.log("agent") or None)
    wait("both on file again", lambda: holders(gated) is not None or None)

    assert interfaces(begin(gated)) == ["eth0"]
    assert status_of_network(gated) == 0
    gated.end_pods("plain")
    (gated.folder / "closed").unlink()
    gated.end_pods("former")
    assert spooled(gated) != []
    trainer = gated.pod("trainer")
    assert trainer is not None
    assert trainer["phase"] == "Pending"

    (gated.folder / "config.yaml").write_text(yaml.safe_dump(document))
    assert interfaces(gated.await_pod("trainer")) == ["eth0", "net1"]
    gated.await_ready()
    wait("the former one to be gone", lambda: attached(gated) == ["default/trainer attached"] or None)
