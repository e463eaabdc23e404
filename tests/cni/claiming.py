"""A node with DRA claims and pods that come: real books, real links, and what kubelet and the API server would say."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.config import Config, Resource
from agent.edits.specs import Specs, file_of_claim
from agent.errors import Unavailable
from agent.kubelet.podresources import ClaimedDevice, ContainerDevices, KubeletAsker, PodDevices
from agent.model.allocation import Claim, ClaimRef, ClaimState, Hold, PodRef
from agent.model.health import HEALTHY
from agent.offer.offer import Offer, Unit
from agent.state import Latest
from cni.add_facts import FactsWriter, RailFiles
from cni.attachment import Attachments, Settings
from cni.call import Node
from cni.pod_devices import ClaimReader, HeldDevices
from cni.pods_file import PodsFile
from hack.sim.machine import SimulatedMachine
from tests.cni.networks import PREVIOUS, network
from tests.cni.stand_ins import NoSlots
from tests.cni.tiny_node import PF, PF_NETDEV, Rig, vf
from tests.node import claimed

RAILS = network({"name": "rails", "mtu": 1400})
RESOURCES = (
    Resource("rdma/vf", "vf", offer="dra"),
    Resource("rdma/hca", "hca", offer="dra"),
    Resource("plugin/vf", "vf"),
)


class Kubelet:
    """Says which claims pods have, and counts how often it is asked."""

    def __init__(self) -> None:
        self.claims: dict[str, tuple[str, ...]] = {}
        """Name of a pod → the claims that its containers have."""
        self.asked = 0
        self.is_away = False

    def pod(self, pod: PodRef) -> PodDevices | None:
        self.asked += 1
        if self.is_away:
            raise Unavailable("kubelet is away")
        if pod.name not in self.claims:
            return None
        found = (ClaimedDevice(pod.namespace, name, "nodefabric.io", "node", "x") for name in self.claims[pod.name])
        return PodDevices(pod, (ContainerDevices("main", claimed=tuple(found)),))


class Reader:
    """The API server: claims by name, or an error."""

    def __init__(self) -> None:
        self.claims: dict[str, Mapping[str, Any]] = {}
        self.error: Exception | None = None
        self.read: list[str] = []

    def get(self, ref: ClaimRef) -> Mapping[str, Any] | None:
        self.read.append(ref.name)
        if self.error is not None:
            raise self.error
        return self.claims.get(ref.name)


class Scene:
    """A node with claims, and pods that come."""

    def __init__(self, rig: Rig, machine: SimulatedMachine | None = None) -> None:
        machine = machine or rig.machine
        subprocess.run(["ip", "link", "set", PF_NETDEV, "up"], check=True)
        self.rig = rig
        rig.ledger.is_new = False  # as after a start that found books
        self.kubelet = Kubelet()
        self.reader = Reader()
        specs = Specs(rig.ledger, rig.folder / "cdi")
        self.specs = specs
        self.config = Latest(Config(resources=RESOURCES, networks=(RAILS,)))
        node = Node(machine, rig.ledger, Latest(machine.scan()))
        kubelet = cast(KubeletAsker, self.kubelet)
        self.asks = Latest[ClaimReader | None](self.reader)
        offered = {"rdma/vf": tuple(Unit(vf(i), "rdma/vf", "vf", vf(i), HEALTHY, 0) for i in range(3))}
        offer = Latest(Offer(node.scans.value, claimable=offered))
        files = RailFiles(rig.folder / "cdi", offer, kubelet, Latest({}))
        facts = FactsWriter(self.config, node, specs, files, {})
        holders = cast(PodsFile, SimpleNamespace(noted=(), is_settled=True))
        self.granted = HeldDevices(self.config, node, kubelet, offer, holders, self.asks)
        rig.attachments.close()
        settings = Settings(0.3)
        rig.attachments = Attachments(node, self.granted, NoSlots(), facts, settings)

    def claim(self, name: str, *devices: Hold, pods: tuple[str, ...] = ("c1",), owned: bool = True) -> Claim:
        """Prepare a claim for pods; with `owned` it is the first one's alone."""
        refs = tuple(pod_of(container) for container in pods)
        ref = ClaimRef(f"uid-{name}", "default", name)
        wanted = Claim(ref, ClaimState.PREPARING, devices, refs, "uid-of-owner" if owned else "")
        claim = self.rig.ledger.prepare_claim(wanted)
        self.specs.sync([file_of_claim(ref.uid)])
        self.rig.ledger.set_claim_state(ref.uid, ClaimState.PREPARED)
        return claim

    def start(self, container_id: str, pod: Path | None = None) -> Mapping[str, Any]:
        """Make a pod's sandbox: our plugin is chained after the pod's network."""
        return self.rig.add(container_id, pod or self.rig.pod(container_id), "eth0", prevResult=PREVIOUS)

    def rows(self) -> dict[str, tuple[str, str, str]]:
        """Tell of each device in a pod its sandbox, its name there, and its claim."""
        rows = self.rig.ledger.attachments()
        return {row.device: (row.owner.container_id, row.ifname, row.claim_uid) for row in rows}


def pod_of(container_id: str) -> PodRef:
    """Name a pod as the rig does; the runtime tells no UID."""
    return PodRef("default", f"pod-of-{container_id}")


def of_vf(index: int = 0, **more: Any) -> Hold:
    made = {"request": f"nic{index}", "resource_name": "rdma/vf", "kind": "vf", "device": vf(index), **more}
    return claimed(pool="node", device_name=f"vf-{index}", key=f"name-{index}", **made)


def of_share(number: int = 0, **more: Any) -> Hold:
    return claimed(
        "share", "node", "hca", "rdma/hca", "hca", PF, f"share-{number}", f"s{number}", exclusive=False, **more
    )


@pytest.fixture
def scene(rig: Rig) -> Scene:
    """The node of the test's own, with nothing prepared."""
    return Scene(rig)
