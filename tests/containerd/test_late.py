"""Late binding with a real runtime: a container finds exactly the device that was chosen for its pod."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.hardware import recorded
from agent.model.locality import Locality
from agent.placement import Distances
from hack.sim.machine import SimulatedMachine
from hack.sim.stage import CONFIG, wait
from tests.containerd import machine
from tests.containerd.node import SPECS, Node, Pod, specs
from tests.containerd.suites import RUNTIMES
from tests.renumbered import lay_out

PODS = 50
LATE: Mapping[str, Any] = {
    **CONFIG,
    "resources": [
        {
            "name": "rdma/vf",
            "kind": "vf",
            "binding": "late",
            "slots": 4,
            "select": {"vendors": ["15b3"]},
            "network": "rails",
        },
        {"name": "nvidia.com/gpu", "kind": "gpu"},
    ],
}
LOOK = "cd /dev/infiniband; for f in *; do b stat -c '%n %t:%T' $f; done; echo PCI=$PCIDEVICE_RDMA_VF"


@dataclass
class Late:
    """The node with slots, and what its VFs are."""

    node: Node
    hardware: SimulatedMachine

    def __post_init__(self) -> None:
        self.snapshot = self.hardware.scan()
        self.distances = Distances(self.snapshot)
        self.links = self.hardware.links.by_device()

    def devices_in(self, sandbox: str) -> list[str]:
        """The VFs in a sandbox, by the MACs of its interfaces."""
        by_mac = {link.mac: device for device, link in self.links.items()}
        found = self.node.links(sandbox)
        return [by_mac[found[name]["address"]] for name in sorted(found) if name.startswith("net")]

    def expected(self, devices: list[str]) -> dict[str, str]:
        """What a container with these VFs must find in /dev/infiniband, and nothing else."""
        nodes = {
            Path(c.path).name
            for device in devices
            for rdma in self.snapshot.by_address[device].rdma_devices
            for c in rdma.char_device("uverbs")
        }
        assert len(nodes) == len(devices)
        return {name: f"{machine.RDMA_MAJOR:x}:{machine.minor_of(name):x}" for name in (*nodes, "rdma_cm")}

    def seen(self, container: str) -> tuple[dict[str, str], list[str]]:
        """What a container finds there, and the addresses that it is told."""
        shown = self.node.shell(container, LOOK)
        assert shown.status == 0, shown.stderr
        *files, told = shown.stdout.splitlines()
        return dict(line.split() for line in files), told.removeprefix("PCI=").split(",")

    def check(self, pod: Pod, sandbox: str, container: str) -> list[str]:
        """Compare all there is to know of a pod's devices, and return them."""
        devices = self.devices_in(sandbox)
        files, told = self.seen(container)
        assert files == self.expected(devices)
        assert told == devices
        for gpu, device in zip(
            sorted(pod.units("nvidia.com/gpu"), key=self.distances.gpus.index), devices, strict=False
        ):
            assert self.distances.distance(gpu, device) is Locality.PIX
        return devices


@pytest.fixture
def late(bare: tuple[Node, SimulatedMachine]) -> Iterator[Late]:
    """The 8-GPU node with four slots and an agent that is ready."""
    node, hardware = bare
    node.configure(LATE)
    node.start_agent()
    yield Late(node, hardware)
    if (node.stage.folder / "node-2").exists():
        SimulatedMachine.destroy(node.stage.folder / "node-2")


def test_fifty_pods_on_the_same_four_slots_find_each_its_own_device(late: Late) -> None:
    node, began = late.node, time.monotonic()
    slots: dict[str, int] = {}
    meanings: dict[str, set[str]] = {}
    ended: list[str] = []
    former: tuple[Pod, str] | None = None
    for n in range(PODS):
        if n == PODS // 2:  # with two GPUs taken the same slots mean what is near to others
            node.admit("trainer", {"nvidia.com/gpu": 2})
        size = 2 if n % 4 in (1, 2) else 1
        pod = node.admit(f"p{n}", {"rdma/vf": size, "nvidia.com/gpu": size})
        sandbox = node.run(pod)
        devices = late.check(pod, sandbox, node.start_container(pod, sandbox))
        for slot in pod.units("rdma/vf"):
            slots[slot] = slots.get(slot, 0) + 1
            if size == 1:
                meanings.setdefault(slot, set()).add(devices[0])
        for old in ended:  # their second DEL comes when the slots are another pod's
            node.runtime.cri.stop_sandbox(old)
            node.runtime.cri.remove_sandbox(old)
        ended.clear()
        if former is not None:  # it has lived beside this one, so this one has another GPU
            node.runtime.cri.stop_sandbox(former[1])
            node.forget(former[0])
            ended.append(former[1])
        former = (pod, sandbox)
    assert former is not None
    for old in (former[1], *ended):
        node.end(old)
    node.forget(former[0])
    node.stage.delete_pod("trainer")
    print(f"{PODS} pods in {time.monotonic() - began:.1f} s: slots {slots}, that meant {meanings}")
    assert len(slots) == 4
    assert min(slots.values()) > 1
    assert any(len(found) > 1 for found in meanings.values())  # what a slot means changes with its pod
    assert node.unhealed(late.hardware, late.links) == []


def test_a_container_that_starts_again_finds_its_device_though_agent_and_specs_were_gone(late: Late) -> None:
    node = late.node
    pod = node.admit("a", {"rdma/vf": 1, "nvidia.com/gpu": 1})
    sandbox = node.run(pod)
    before = late.check(pod, sandbox, node.start_container(pod, sandbox))
    node.stage.end("agent")
    for name in specs():
        (SPECS / name).unlink()
    node.start_agent()
    wait("the specs", lambda: specs() or None)
    assert late.check(pod, sandbox, node.start_container(pod, sandbox, attempt=1)) == before
    # A new sandbox of the pod, before the old one's DEL: another device behind the same slot.
    second = node.run(pod, attempt=1)
    after = late.check(pod, second, node.start_container(pod, second, attempt=2))
    assert after != before
    node.end(sandbox)
    assert len(specs()) == 1
    assert late.seen(node.start_container(pod, second, attempt=3))[1] == after
    node.end(second)
    assert specs() == []


@RUNTIMES
def test_a_container_has_the_device_that_was_chosen_at_its_sandbox_for_itself_also_when_the_books_are_lost(
    late: Late,
) -> None:
    node = late.node
    pod = node.admit("a", {"rdma/vf": 1, "nvidia.com/gpu": 1})
    assert specs() == []
    sandbox = node.run(pod)
    assert len(specs()) == 1
    before = late.check(pod, sandbox, node.start_container(pod, sandbox))
    node.lose_books()
    assert 'nodefabric_reconcile_actions_total{action="slot-rebind",reason="books-lost"} 1.0' in node.stage.fetch(
        "/metrics"
    )
    other = node.admit("b", {"rdma/vf": 3, "nvidia.com/gpu": 3})
    second = node.run(other)
    assert len({*before, *late.check(other, second, node.start_container(other, second))}) == 4
    assert len(specs()) == 4
    assert late.check(pod, sandbox, node.start_container(pod, sandbox, attempt=1)) == before
    node.end(second)
    node.end(sandbox)  # its DEL finds the slot by the sandbox, which the runtime has told
    assert specs() == []
    assert node.unhealed(late.hardware, late.links) == []


def test_a_pod_that_returns_after_a_reboot_finds_its_device_under_its_new_address(late: Late) -> None:
    node, stage = late.node, late.node.stage
    pod = node.admit("a", {"rdma/vf": 1, "nvidia.com/gpu": 1})
    sandbox = node.run(pod)
    late.check(pod, sandbox, node.start_container(pod, sandbox))
    stage.end("agent")
    node.end(sandbox)  # a reboot ends it without a word; here the DELs wait for the next agent
    place = _renumbered(stage.folder)
    hardware = SimulatedMachine.open(place)
    stage.host = ("--simulate", str(place))
    for path in Path("/dev/infiniband").glob("uverbs*"):
        path.unlink()
    for name in (c.path for device in hardware.scan().devices for r in device.rdma_devices for c in r.char_devices):
        machine.make_rdma_device(name)
    node.start_agent()
    moved = Late(node, hardware)
    second = node.run(pod, attempt=1)  # kubelet does not ask again: the answer is the one of before
    (device,) = moved.check(pod, second, node.start_container(pod, second, attempt=1))
    assert device.startswith("0001:")
    node.end(second)
    assert node.unhealed(hardware, moved.links) == []
    hardware.close()


def _renumbered(folder: Path) -> Path:
    """Lay the node out once more as another boot may find it: other addresses, other numbers of RDMA devices."""
    SimulatedMachine.destroy(folder / "node")
    text = recorded.find("h100-8gpu").read_text()
    text = re.sub(r'0000:([0-9a-f]{2})(?=[:"/])', r"0001:\1", text)
    text = re.sub(r"(uverbs|umad|issm|mlx5_)(\d+)", lambda found: f"{found[1]}{int(found[2]) + 100}", text)
    return lay_out(folder, "node-2", text)
