"""A reboot with a real runtime: devices have each other's numbers, and each container opens its own and no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.hardware import recorded
from agent.model.device import Snapshot
from hack.sim.machine import SimulatedMachine
from hack.sim.stage import CONFIG, Stage
from tests.containerd import machine
from tests.containerd.cri import RuntimeRefused
from tests.containerd.node import SPECS, Node, Pod
from tests.containerd.suites import RUNTIMES
from tests.e2e.test_late import hand_to_programs
from tests.renumbered import lay_out, permuted

VFIO_MAJOR = 511
VFIO = {"0000:18:00.2": 70, "0000:3a:00.2": 71}
"""VFs for programs, and their IOMMU groups."""
DOCUMENT: Mapping[str, Any] = {
    "resources": [
        {"name": "rdma/hca", "kind": "hca", "management": True, "environment": ["nccl"], "shares": 4},
        {"name": "dpdk/vf", "kind": "vf", "select": {"pciAddresses": list(VFIO), "drivers": ["vfio-pci"]}},
        {"name": "rdma/vf", "kind": "vf", "select": {"pciAddresses": ["0000:5a:00.1", "0000:9a:00.1"]}},
        *CONFIG["resources"][2:],
    ],
}
PODS = {"a": {"rdma/hca": 2}, "b": {"rdma/hca": 1, "dpdk/vf": 1}, "c": {"dpdk/vf": 1}, "d": {"rdma/vf": 2}}
LOOK = (
    "for f in /dev/infiniband/* /dev/vfio/*; do b test -c $f && b stat -c '%n %t:%T' $f; done; echo NCCL=$NCCL_IB_HCA"
)


@dataclass
class Early:
    """The node as it is in one boot."""

    node: Node
    snapshot: Snapshot

    def own(self, pod: Pod) -> dict[str, str]:
        """The device files of a pod's units, by the node's sysfs: path → numbers."""
        granted = {grant["unit"]: grant["device"] for grant in self.node.stage.status()["grants"]}
        units = [unit for name in PODS[pod.name] for unit in pod.units(name)]
        devices = [self.snapshot.by_address[granted[unit]] for unit in units]
        rdma = [c.path for d in devices if not d.is_for_vfio for r in d.rdma_devices for c in r.char_devices]
        if pod.units("rdma/vf"):
            rdma = [path for path in rdma if "uverbs" in path]
        groups = [f"/dev/vfio/{d.iommu_group}" for d in devices if d.is_for_vfio]
        files = [
            *rdma,
            *(["/dev/infiniband/rdma_cm"] if rdma else ()),
            *groups,
            *(["/dev/vfio/vfio"] if groups else ()),
        ]
        return {path: numbers_of(path) for path in files}

    def nccl(self, pod: Pod) -> str:
        granted = {grant["unit"]: grant["device"] for grant in self.node.stage.status()["grants"]}
        units = sorted(pod.units("rdma/hca"))
        names = dict.fromkeys(r.name for u in units for r in self.snapshot.by_address[granted[u]].rdma_devices)
        return "=" + ",".join(names) if names else ""

    def check(self, pod: Pod, sandbox: str, attempt: int) -> dict[str, str]:
        """Start a pod's container, and compare what it finds with what is its own."""
        shown = self.node.shell(self.node.start_container(pod, sandbox, attempt), LOOK)
        assert shown.status == 0, shown.stderr
        *files, told = shown.stdout.splitlines()
        found = dict(line.split() for line in files)
        assert found == self.own(pod)
        assert told == f"NCCL={self.nccl(pod)}"
        return found


def numbers_of(path: str) -> str:
    name = Path(path).name
    if path.startswith("/dev/vfio/"):
        return f"{VFIO_MAJOR:x}:{0 if name == 'vfio' else int(name):x}"
    return f"{machine.RDMA_MAJOR:x}:{machine.minor_of(name):x}"


def bind(hardware: SimulatedMachine, groups: Mapping[str, int]) -> Snapshot:
    for address, group in groups.items():
        hand_to_programs(hardware.root / "sys/bus/pci/devices" / address, group)
    return hardware.scan()


@pytest.fixture
def early(bare: tuple[Node, SimulatedMachine]) -> Iterator[Early]:
    """The 8-GPU node with an agent that is ready, and files for its VFs for programs."""
    node, hardware = bare
    Path("/dev/vfio").mkdir()
    for path in ("/dev/vfio/vfio", *(f"/dev/vfio/{group}" for group in VFIO.values())):
        machine.make_device(Path(path), (VFIO_MAJOR, 0 if path.endswith("vfio") else int(Path(path).name)))
    snapshot = bind(hardware, VFIO)
    node.configure(DOCUMENT)
    node.start_agent()
    yield Early(node, snapshot)
    if (node.stage.folder / "node-2").exists():
        SimulatedMachine.destroy(node.stage.folder / "node-2")


def reboot(stage: Stage) -> Snapshot:
    """Lay the node out anew with permuted numbers. Specs are on a tmpfs, and gone."""
    for spec in SPECS.glob("nodefabric-*"):
        spec.unlink()
    SimulatedMachine.destroy(stage.folder / "node")
    place = lay_out(stage.folder, "node-2", permuted(recorded.find("h100-8gpu").read_text()))
    hardware = SimulatedMachine.open(place)
    snapshot = bind(hardware, dict(zip(VFIO, reversed(VFIO.values()), strict=True)))
    hardware.close()
    stage.host = ("--simulate", str(place))
    return snapshot


@RUNTIMES
def test_each_container_opens_its_own_devices_and_no_other_under_permuted_numbers(early: Early) -> None:
    node, stage = early.node, early.node.stage
    pods = {name: node.admit(name, limits) for name, limits in PODS.items()}
    assert not any(container["device_nodes"] for pod in pods.values() for container in pod.containers)
    sandboxes = {name: node.run(pod) for name, pod in pods.items()}
    before = {name: early.check(pod, sandboxes[name], 0) for name, pod in pods.items()}
    stage.end("agent")
    later = Early(node, reboot(stage))
    # kubelet may be up before the agent: a container is refused rather than given what its numbers are by now.
    with pytest.raises(RuntimeRefused, match=r"nodefabric\.io/hca="):
        node.start_container(pods["a"], sandboxes["a"], attempt=1)
    for sandbox in sandboxes.values():  # a reboot ends them without a word; here the DELs wait for the next agent
        node.end(sandbox)
    node.start_agent()
    sandboxes = {name: node.run(pod, attempt=2) for name, pod in pods.items()}
    after = {name: later.check(pod, sandboxes[name], 2) for name, pod in pods.items()}
    assert all(after[name] != before[name] for name in pods)
    for sandbox in sandboxes.values():
        node.end(sandbox)
