"""The agent with the real pynvml over the fake library: what happens to GPUs reaches kubelet, and ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.commands.options import WRONG_INPUT
from agent.errors import AgentError
from agent.hardware import recorded
from hack.sim import uevents
from hack.sim.stage import CONFIG, Stage, wait
from tests.nvml.fake import DRIVER_NOT_LOADED, GPU_IS_LOST, FakeDriver, FakeGpu, FakeMig, as_recorded, environment

GPUS: tuple[FakeGpu, ...] = tuple(as_recorded(g) for g in recorded.load(recorded.find("h100-8gpu")).gpus)
NAME = "nvidia.com/gpu"


class Node:
    """A stage whose GPUs come from the fake library."""

    def __init__(self, stage: Stage, driver: FakeDriver, library: Path) -> None:
        self.stage = stage
        self.driver = driver
        self.library = library

    def start(self, **resource: Any) -> None:
        """Start all, with these settings of the GPUs' resource."""
        resources = [r if r["name"] != NAME else {**r, **resource} for r in CONFIG["resources"]]
        self.stage.build_node("h100-8gpu")
        (self.stage.folder / "node/gpus.live").write_text(json.dumps({"quick": 0.2, "apart": 0.1, "overdue": 1.0}))
        self.stage.run({"resources": resources, "rescanSeconds": 3600}, env=environment(self.library, self.driver))

    def kubelets(self) -> dict[str, tuple[int, int]]:
        """Return what kubelet counts of GPUs: all, and those it may hand out."""
        node = json.loads((self.stage.folder / "pods/node.json").read_text())
        return {
            name: (count, node["allocatable"][name])
            for name, count in node["capacity"].items()
            if name.startswith("nvidia.com/")
        }

    def await_kubelet(self, **counts: tuple[int, int]) -> None:
        """Wait until kubelet counts so; `mig_1g_10gb` stands for nvidia.com/mig-1g.10gb."""
        wanted = {f"nvidia.com/{key.replace('mig_', 'mig-').replace('_', '.')}": n for key, n in counts.items()}
        try:
            wait("kubelet's count", lambda: self.kubelets() == wanted or None)
        except AgentError as error:
            raise AssertionError(f"kubelet counts {self.kubelets()}, not {wanted}") from error

    def reasons(self) -> dict[str, str]:
        """Return the agent's unhealthy GPU units with their reasons."""
        [gpus] = [r for r in self.stage.status()["resources"] if r["name"] == NAME]
        return {unit["unit"]: unit["reason"] for unit in gpus["unhealthy"]}

    def problems(self) -> list[str]:
        return [problem["text"] for problem in self.stage.status()["problems"]]


@pytest.fixture
def node(stage: Stage, nvml_library: Path) -> Node:
    return Node(stage, FakeDriver(stage.folder / "driver").show(*GPUS), nvml_library)


def test_a_lost_gpu_leaves_and_returns_and_no_other_does(node: Node) -> None:
    node.start()
    node.await_kubelet(gpu=(8, 8))
    wait("the errors to be heard", lambda: heard(node))
    node.driver.xid("GPU-of-nobody", 95)
    wait("the error", lambda: 'xid="95"} 1.0' in node.stage.fetch("/metrics") or None)
    assert node.kubelets() == {NAME: (8, 8)}
    node.driver.change(GPUS[3].uuid, error=GPU_IS_LOST)
    node.driver.xid(GPUS[3].uuid, 79)
    node.await_kubelet(gpu=(8, 7))
    wait("the reading", lambda: node.reasons() == {GPUS[3].uuid: "GpuLost"} or None)
    assert 'nodefabric_unit_unhealthy{reason="GpuLost",resource="nvidia.com/gpu"} 1.0' in node.stage.fetch("/metrics")
    node.driver.change(GPUS[3].uuid, error=0)
    node.await_kubelet(gpu=(8, 8))
    assert node.reasons() == {}


def test_a_driver_that_is_loaded_late_is_found_and_when_it_hangs_nothing_else_does(node: Node) -> None:
    node.driver.show(init=DRIVER_NOT_LOADED)
    node.start()
    node.await_kubelet(gpu=(0, 0))
    node.driver.show(*GPUS)
    uevents.emit("bind", "/devices/pci0000:15/0000:1b:00.0", "pci")
    node.await_kubelet(gpu=(8, 8))
    node.driver.hang("DeviceGetCount", "DeviceGetUUID", "EventSetWait", "Init", "Shutdown")
    wait("the hang to be told", lambda: any("does not answer" in text for text in node.problems()) or None)
    pod = node.stage.run_pod("a", {NAME: 2, "rdma/vf": 2})
    assert len(pod["containers"][0]["devices"][NAME]) == 2
    assert node.kubelets()[NAME] == (8, 8)
    node.stage.end_pods("a")
    process = node.stage.processes["agent"]
    node.stage.end("agent")
    assert process.returncode == 0  # by itself, then


def test_slices_come_and_go_with_their_resources(node: Node) -> None:
    node.start(mig="mixed")
    node.await_kubelet(gpu=(8, 8))
    cut = tuple(FakeMig(f"MIG-{n:08x}-0000-4000-8000-000000000000", n) for n in (7, 8, 9))
    node.driver.change(GPUS[0].uuid, mig=cut)
    node.await_kubelet(gpu=(7, 7), mig_1g_10gb=(3, 3))
    assert [(r["name"], r["kind"]) for r in node.stage.status()["resources"]][-1] == ("nvidia.com/mig-1g.10gb", "gpu")
    pod = node.stage.run_pod("a", {"nvidia.com/mig-1g.10gb": 1})
    [granted] = pod["containers"][0]["devices"]["nvidia.com/mig-1g.10gb"]
    assert granted in {m.uuid for m in cut}
    node.driver.change(GPUS[0].uuid, mig=None)
    node.await_kubelet(gpu=(8, 8), mig_1g_10gb=(1, 0))  # what a pod holds stays listed, as gone


def test_a_fatal_error_takes_one_gpu_away_until_it_was_found_anew_or_reset_in_a_pause(node: Node) -> None:
    node.start(replicas=2)
    node.await_kubelet(gpu=(16, 16))
    wait("the errors to be heard", lambda: heard(node))
    bound, reset, left = GPUS[2], GPUS[0], GPUS[1]
    node.driver.xid(bound.uuid, 79)
    node.await_kubelet(gpu=(16, 14))
    assert node.reasons() == {f"{bound.uuid}::0": "XidFatal", f"{bound.uuid}::1": "XidFatal"}
    metrics = node.stage.fetch("/metrics")
    assert 'nodefabric_unit_unhealthy{reason="XidFatal",resource="nvidia.com/gpu"} 2.0' in metrics
    assert 'nodefabric_gpu_errors_total{class="fatal",xid="79"} 1.0' in metrics
    told = [e["text"] for e in node.stage.status()["events"] if e["subject"] == bound.uuid]
    assert "XID 79 (fatal): fallen off the bus" in told
    uevents.emit("bind", f"/devices/pci0000:48/{bound.bus[4:].lower()}", "pci")
    node.await_kubelet(gpu=(16, 16))

    for ill in (reset, left):
        node.driver.xid(ill.uuid, 119)
    node.await_kubelet(gpu=(16, 12))
    assert pause(node, "GPU9").returncode == WRONG_INPUT
    done = pause(node, reset.uuid, "--seconds", "600")
    assert done.returncode == 0, done.stderr
    assert f"reset {reset.uuid} now" in done.stdout
    wait("the pause", lambda: any("let go for a reset" in text for text in node.problems()) or None)
    assert node.kubelets() == {NAME: (16, 12)}
    assert pause(node, reset.uuid, "--seconds", "0").returncode == 0
    node.await_kubelet(gpu=(16, 14))
    assert set(node.reasons()) == {f"{left.uuid}::0", f"{left.uuid}::1"}


def pause(node: Node, *words: str) -> subprocess.CompletedProcess[str]:
    config = str(node.stage.folder / "config.yaml")
    command = [sys.executable, "-m", "agent", "pause-gpus", *words, "--config", config]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def heard(node: Node) -> bool | None:
    """Send an error that means nothing, and tell whether one was counted: then they are listened to."""
    node.driver.xid(GPUS[0].uuid, 13)
    return 'xid="13"' in node.stage.fetch("/metrics") or None
