"""A binder with its books, one switch with a GPU and four VFs, and a kubelet that says what a test tells it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.config import Config, Resource
from agent.edits.specs import Specs
from agent.kubelet import checkpoint
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, HeldUnit, PodDevices
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from agent.offer.offer import Offer
from agent.offer.units import plain_offer
from agent.reconcile.grants import Grants
from agent.reconcile.lost_books import LostBooks
from agent.reconcile.view import View
from agent.state import Latest
from cni import netconf
from cni.call import Call
from cni.slots.binder import Binder
from tests.agent.reconcile.outside import Answers
from tests.cni.stand_ins import FixedDevices
from tests.live import Live
from tests.node import attach, change, granted, node, owner, rdma

LATE = Resource("rdma/vf", "vf", binding="late")
HELPED = Resource("rdma/hca", "hca", shares=2, environment=("nccl",))
RESOURCES = (LATE, Resource("nvidia.com/gpu", "gpu"), HELPED)
POD = PodRef("default", "a", "uid-a")
OTHER = PodRef("default", "b", "uid-b")


def slot(number: int) -> str:
    """Name a slot of the resource."""
    return f"slot-rdma:vf-0-{number}"


def snapshot_with_rdma() -> Snapshot:
    """One switch with a GPU and four VFs, each with an RDMA device."""
    snapshot = node(rails=1, vfs=4)
    for n, device in enumerate(d for d in snapshot.devices if d.is_vf):
        snapshot = change(snapshot, device.address, rdma_devices=(rdma(10 + n, f"0000:0000:0000:000{n + 1}"),))
    return snapshot


def stock_of(snapshot: Snapshot) -> Offer:
    """List what is offered."""
    return plain_offer(RESOURCES, snapshot)


@dataclass
class Rig:
    """A binder with its books, and a kubelet that says what a test tells it."""

    folder: Path
    ledger: Ledger
    stock: Offer
    pods: dict[PodRef, PodDevices] = field(default_factory=dict)
    asked: int = 0
    settled: bool = True
    resources: tuple[Resource, ...] = RESOURCES

    def __post_init__(self) -> None:
        self.binder = self.make()

    def make(self, busy_seconds: float = 0.2) -> Binder:
        config = Live(lambda: Config(resources=self.resources, kubelet_dir=self.folder))
        self.specs = Specs(self.ledger, self.folder / "cdi")
        self.outside = Answers()
        self.outside.says_noted = lambda: checkpoint.entries(self.folder)
        self.grants = Grants(self.ledger, self.specs, Latest(Snapshot()), self.outside, Latest(False))
        offer = Live(lambda: self.stock)
        return Binder(config, self.ledger, self.specs, offer, self._held(), busy_seconds=busy_seconds)

    def heal(self, known: View) -> list[tuple[str, str]]:
        """Have a new agent on these books look after slots and specs. List what it did with them."""
        self.binder = self.make()
        LostBooks(self.ledger, self.specs, self.outside).heal(known)
        self.grants.heal(known)
        return [done for done in self.outside.counted if done[0].startswith(("slot-", "spec-"))]

    def known(self, sandboxes: Sequence[Sandbox] | None = None) -> View:
        """What kubelet says of all pods by now, and the runtime of its sandboxes."""
        held_units = [
            HeldUnit(PodRef(pod.namespace, pod.name), devices.resource_name, unit, container.name)
            for pod, found in self.pods.items()
            for container in found.containers
            for devices in container.devices
            for unit in devices.device_ids
        ]
        pods = {(pod.namespace, pod.name) for pod in self.pods} | {("kube-system", "nodefabric")}
        return View(time.time(), held_units, pods, sandboxes)

    def grant(self, pod: PodRef, *slots: str, gpus: tuple[str, ...] = (), container: str = "worker") -> None:
        """Have kubelet give a container of a pod these."""
        self.specs.grant(granted("rdma/vf", dict.fromkeys(slots, "")))
        devices = (DeviceAssignment("rdma/vf", slots), DeviceAssignment("nvidia.com/gpu", gpus))
        before = self.pods.get(pod) or PodDevices(pod)
        self.pods[pod] = replace(before, containers=(*before.containers, ContainerDevices(container, devices)))

    def bind(self, call: Call, wanted: Callable[[], bool] = lambda: True) -> dict[str, str]:
        return {found.unit_id: found.device for found in self.binder.bind(call, wanted)}

    def attach(self, device: str, call: Call) -> int:
        """Put a device into a sandbox, as far as the books know. Returns the row's number."""
        return attach(self.ledger, device, owner(call.container_id, call.ifname, call.pod)).attachment_id

    def spec(self, slot_id: str) -> dict[str, Any] | None:
        path = self.folder / f"cdi/nodefabric-{slot_id}.json"
        if not path.exists():
            return None
        (device,) = json.loads(path.read_text())["devices"]
        found: dict[str, Any] = device["containerEdits"]
        return found

    def _held(self) -> FixedDevices:
        """What kubelet says."""

        def ask(pod: PodRef) -> PodDevices | None:
            self.asked += 1
            return self.pods.get(pod)

        return FixedDevices(asked_for=ask, settles=lambda: self.settled)

    @property
    def vfs(self) -> list[str]:
        return [device.address for device in self.stock.snapshot.devices if device.is_vf]


def call(container: str, pod: PodRef = POD, ifname: str = "eth0", device: str | None = None) -> Call:
    conf = netconf.from_document({"cniVersion": "1.0.0", "name": "net", **({"deviceID": device} if device else {})})
    return Call(container, ifname, None, "/nowhere", pod, "", "", conf)
