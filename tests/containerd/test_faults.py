"""What may go wrong between runtime, relay and agent: the pod is told why, and its VF comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from agent.kubelet.cri import ContainerRuntime
from agent.model.allocation import PodRef
from hack.sim.demo import still_attached
from hack.sim.machine import SimulatedMachine
from hack.sim.stage import settled, wait
from tests.containerd.cri import RuntimeRefused
from tests.containerd.node import Node, Pod
from tests.containerd.suites import RUNTIMES

VF = "0000:18:00.1"
ONE_VF = {
    "resources": [{"name": "rdma/vf", "kind": "vf", "select": {"pciAddresses": [VF]}, "network": "rails"}],
}


def spooled(node: Node) -> int:
    return len(list((node.stage.folder / "state/spool").glob("*.del")))


def tried_again(node: Node, pod: Pod) -> str | None:
    try:
        return node.run(pod, attempt=pod.config.metadata.attempt + 1)
    except RuntimeRefused:
        return None


def names_in(netns: Path) -> str:
    command = ["nsenter", f"--net={netns}", "ip", "-brief", "link"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@RUNTIMES
def test_a_pod_outlives_its_runtime_which_tells_whose_the_vfs_are_when_the_books_are_lost_too(
    node: Node, hardware: SimulatedMachine
) -> None:
    before = hardware.links.by_device()
    pod = node.admit("a", {"rdma/vf": 1})
    sandbox = node.run(pod)
    container = node.start_container(pod, sandbox)
    netns = node.runtime.netns(sandbox)
    node.runtime.end(signal.SIGKILL)
    assert "net1" in names_in(netns)
    node.runtime.start()
    assert node.runtime.cri.sandboxes() == {sandbox: True}
    assert "net1" in node.shell(container, "b ip link").stdout
    (known,) = asyncio.run(ContainerRuntime(node.runtime.socket).sandboxes())
    assert (known.sandbox_id, known.pod, known.ready) == (
        sandbox,
        PodRef("default", "a", pod.config.metadata.uid),
        True,
    )
    node.lose_books()
    rows = wait("a row for the VF", lambda: node.stage.status()["attachments"] or None)
    assert [(row["device"], row["container"], row["pod"]) for row in rows] == [
        (*pod.units("rdma/vf"), sandbox, "default/a")
    ]
    node.end(sandbox)
    assert settled(lambda: still_attached(node.stage)) == []
    assert list((node.stage.folder / "leases-rails/rails").glob("192.168.*")) == []
    names = {device: link.name for device, link in before.items()}
    assert {device: link.name for device, link in hardware.links.by_device().items()} == names


def test_a_pod_whose_sandbox_was_killed_is_cleaned_up_by_its_stop(node: Node, hardware: SimulatedMachine) -> None:
    before = hardware.links.by_device()
    sandbox = node.run(node.admit("a", {"rdma/vf": 1}))
    os.kill(node.runtime.cri.sandbox_info(sandbox)["pid"], signal.SIGKILL)
    wait("the runtime to notice", lambda: not node.runtime.cri.sandboxes()[sandbox] or None)
    # The runtime keeps the namespace until the sandbox is stopped, and so does the pod its VF.
    assert "net1" in names_in(node.runtime.netns(sandbox))
    node.end(sandbox)
    assert node.unhealed(hardware, before) == []


def test_a_vf_comes_back_from_a_namespace_that_died_behind_the_runtimes_back(
    node: Node, hardware: SimulatedMachine
) -> None:
    before = hardware.links.by_device()
    pod = node.admit("a", {"rdma/vf": 1})
    sandbox = node.run(pod)
    node.start_container(pod, sandbox)
    netns = node.runtime.netns(sandbox)
    node.runtime.end(signal.SIGKILL)
    node.runtime.kill_pods()
    subprocess.run(["umount", "--lazy", netns], check=True)
    netns.unlink()
    assert node.unhealed(hardware, before) == []
    wait("the count", lambda: "owner-gone" in node.stage.fetch("/metrics") or None)
    node.runtime.start()
    wait("the runtime to notice", lambda: not node.runtime.cri.sandboxes()[sandbox] or None)
    node.end(sandbox)
    assert node.runtime.cri.sandboxes() == {}
    assert node.unhealed(hardware, before) == []


def test_while_the_agent_is_away_pods_stop_and_others_are_told_to_try_again_and_wait_once_it_starts(
    node: Node, hardware: SimulatedMachine
) -> None:
    before = hardware.links.by_device()
    leaves, comes = (node.admit(name, {"rdma/vf": 1}) for name in ("a", "b"))
    left = node.run(leaves)
    node.stage.end("agent", signal.SIGKILL)
    node.runtime.cri.stop_sandbox(left)
    assert spooled(node) >= 1
    with pytest.raises(RuntimeRefused, match=r'type="nodefabric" failed \(add\): .*the nodefabric agent'):
        node.run(comes)
    made: list[str] = []
    runtime = threading.Thread(target=lambda: made.append(node.run(comes, attempt=1)))
    runtime.start()
    node.stage.start_agent()
    runtime.join()
    (sandbox,) = made
    assert "net1" in node.links(sandbox)
    node.stage.await_ready()
    node.end(sandbox)
    assert node.unhealed(hardware, before) == []
    assert spooled(node) == 0
    node.end(left)
    assert node.unhealed(hardware, before) == []


def test_a_vf_that_is_gone_is_named_by_the_runtime(node: Node, hardware: SimulatedMachine) -> None:
    before = hardware.links.by_device()
    pod = node.admit("a", {"rdma/vf": 1})
    (vf,) = pod.units("rdma/vf")
    place = node.stage.folder / "node/root/sys/bus/pci/devices" / vf
    target = place.readlink()
    place.unlink()
    with pytest.raises(RuntimeRefused, match=rf'type="nodefabric" failed \(add\): .*{vf}'):
        node.run(pod)
    place.symlink_to(target)
    sandbox = wait("kubelet's next tries", lambda: tried_again(node, pod))
    assert "net1" in node.links(sandbox)
    node.end(sandbox)
    assert node.unhealed(hardware, before) == []


@RUNTIMES
def test_late_stops_of_a_pod_leave_the_next_pod_alone(
    bare: tuple[Node, SimulatedMachine], hardware: SimulatedMachine
) -> None:
    node, _ = bare
    before = hardware.links.by_device()
    node.configure(ONE_VF)
    node.start_agent()
    first = node.admit("first", {"rdma/vf": 1})
    old = node.run(first)
    node.runtime.cri.stop_sandbox(old)
    node.forget(first)
    second = node.admit("second", {"rdma/vf": 1})
    assert second.units("rdma/vf") == first.units("rdma/vf")
    new = node.run(second)
    container = node.start_container(second, new)
    for _ in range(2):
        node.runtime.cri.stop_sandbox(old)
    node.runtime.cri.remove_sandbox(old)
    assert before[VF].mac in node.shell(container, "b ip link show net1").stdout
    node.end(new)
    assert node.unhealed(hardware, before) == []


def test_the_node_has_no_network_until_the_agent_has_served(bare: tuple[Node, SimulatedMachine]) -> None:
    node, _ = bare

    def network() -> tuple[bool, str]:
        return node.runtime.cri.conditions()["NetworkReady"]

    ready, reason = network()
    assert not ready
    assert "the nodefabric agent" in reason
    node.stage.start_agent()
    wait("the network", lambda: network()[0] or None)
    # kubelet would take all pods' readiness away: a restart of the agent is not worth that.
    node.stage.await_ready()
    node.stage.end("agent", signal.SIGKILL)
    assert network()[0]


def test_pods_start_without_the_plugin_once_it_is_removed(node: Node) -> None:
    node.command("remove-cni")
    assert not (node.runtime.plugins / "nodefabric").exists()
    pod = node.admit("a", {})
    sandbox = wait("the runtime to notice", lambda: tried_again(node, pod))
    assert set(node.links(sandbox)) == {"lo", "eth0"}
    node.end(sandbox)
