"""Claims (DRA) with a real runtime: each container finds the devices of the requests that it names, by CDI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agent.edits.claim_metadata import IN_CONTAINERS
from agent.model.device import Snapshot
from hack.sim.demo import still_attached
from hack.sim.machine import SimulatedMachine
from hack.sim.scheduler import claim, create, devices, kubelet_options, start_api_server
from hack.sim.stage import settled, wait
from tests.containerd import machine
from tests.containerd.cri import Done
from tests.containerd.node import SPECS, Node, Pod, specs
from tests.containerd.suites import RUNTIMES

CLAIMED: Mapping[str, Any] = {
    "resources": [
        {"name": "rdma/vf", "kind": "vf", "offer": "dra", "select": {"vendors": ["15b3"]}, "network": "rails"}
    ],
    "dra": {"metadata": True},
}
POD = {"name": "a", "uid": "11111111-2222-4333-8444-555555555555"}
LOOK = "cd /dev/infiniband; for f in uverbs*; do b stat -c '%n %t:%T' $f; done"
ADAPTER = "0000:18:00.0"


@dataclass(frozen=True)
class Claimed:
    """The node with an agent that offers its VFs to claims, and the port of an API server."""

    node: Node
    hardware: SimulatedMachine
    snapshot: Snapshot
    port: int

    def two_vfs(self) -> dict[str, str]:
        """Wait for the slices and pick two devices, by their names: the PCI address of each."""
        offered = wait("the slices", lambda: devices(self.port) or None)
        found = {one["name"]: one["attributes"]["resource.kubernetes.io/pciBusID"]["string"] for one in offered}
        return {name: found[name] for name in list(found)[:2]}

    def verbs_of(self, address: str) -> str:
        """Name the file of a VF's verbs, as it was before any pod."""
        (rdma,) = self.snapshot.by_address[address].rdma_devices
        (file,) = rdma.char_device("uverbs")
        return Path(file.path).name

    def opened(self, container: str, verbs: str) -> Done:
        """Try to open the file of this number in a container, under a name of its own."""
        minor = machine.minor_of(verbs)
        made = f"b rm -f /tmp/{verbs}; b mknod /tmp/{verbs} c {machine.RDMA_MAJOR} {minor}"
        return self.node.shell(container, f"{made}; exec 3</tmp/{verbs}")

    def seen(self, container: str) -> dict[str, str]:
        """List the files of verbs that a container finds, with their numbers."""
        shown = self.node.shell(container, LOOK)
        assert shown.status == 0, shown.stderr
        return dict(line.split() for line in shown.stdout.splitlines())

    def check(self, container: str, own: str, other: str) -> None:
        """See a container find and open its own device, which no driver has here, and not the other one."""
        assert self.seen(container) == {own: f"{machine.RDMA_MAJOR:x}:{machine.minor_of(own):x}"}
        assert "No such device" in self.opened(container, own).stderr
        assert "not permitted" in self.opened(container, other).stderr

    def check_told(self, container: str, request: str, device: str, mac: str | None) -> None:
        """See a container find the file about the device of its request alone, and not change it."""
        folder = f"{IN_CONTAINERS}/resourceclaims/nics"
        shown = self.node.shell(container, f"cd {folder}; b ls; b cat {request}/nodefabric.io-metadata.json")
        assert shown.status == 0, shown.stderr
        requests, _, document = shown.stdout.partition("\n")
        (told,) = json.loads(document)["requests"][0]["devices"]
        assert (requests, told["name"], told["networkData"]["hardwareAddress"]) == (request, device, mac)
        changed = self.node.shell(container, f"echo x >> {folder}/{request}/nodefabric.io-metadata.json")
        assert "Read-only file system" in changed.stderr


@pytest.fixture
def exclusive(request: pytest.FixtureRequest) -> bool:
    """Whether the node keeps RDMA devices apart by namespaces; parametrize it indirectly."""
    return bool(getattr(request, "param", False))


@pytest.fixture
def claimed(runtime_only: tuple[Node, SimulatedMachine], exclusive: bool) -> Claimed:
    """The 8-GPU node, with an agent that publishes its slices."""
    node, hardware = runtime_only
    if exclusive:
        hardware.rdma.set_mode("exclusive")
        hardware.rdma.withdraw(ADAPTER)  # its number is free, and what moves next takes it
    snapshot = hardware.scan()
    node.configure(CLAIMED)
    port = start_api_server(node.stage)
    node.start_kubelet(*kubelet_options(port))
    node.start_agent("--kubeconfig", str(node.stage.folder / "kubeconfig"))
    return Claimed(node, hardware, snapshot, port)


def named_twice(pod: Pod) -> Pod:
    """Tell the runtime each CDI name a second time, as kubelet up to 1.36.2 does after a second Prepare."""
    return replace(pod, containers=[{**one, "cdi_devices": list(one["cdi_devices"]) * 2} for one in pod.containers])


@RUNTIMES
def test_a_container_opens_the_device_of_the_request_that_it_names_and_not_the_other_ones(claimed: Claimed) -> None:
    node, before = claimed.node, claimed.hardware.links.by_device()
    (first, one), (second, other) = claimed.two_vfs().items()
    uid = claim(claimed.port, "nics", POD, {"request": "a", "device": first}, {"request": "b", "device": second})
    containers = {name: [{"name": "nics", "request": name}] for name in ("a", "b")}
    create(node.stage, POD, ["nics"], containers)
    pod = node.admitted("a")
    spec = f"nodefabric-claim-{uid}.json"
    assert spec in specs()
    told = {one["name"]: one["cdi_devices"] for one in pod.containers}
    assert {name.startswith(f"nodefabric.io/claim={uid}-") for names in told.values() for name in names} == {True}

    sandbox = node.run(pod)
    links = node.links(sandbox)
    assert {links[name]["address"] for name in ("net1", "net2")} == {before[one].mac, before[other].mac}
    started = {name: node.start_container(pod, sandbox, name=name) for name in ("a", "b")}
    claimed.check(started["a"], claimed.verbs_of(one), claimed.verbs_of(other))
    claimed.check(started["b"], claimed.verbs_of(other), claimed.verbs_of(one))
    again = node.start_container(named_twice(pod), sandbox, attempt=1, name="a")
    claimed.check(again, claimed.verbs_of(one), claimed.verbs_of(other))
    claimed.check_told(again, "a", first, before[one].mac)

    node.end(sandbox)
    node.forget(pod)
    assert node.unhealed(claimed.hardware, before) == []


@pytest.mark.parametrize("exclusive", [True], indirect=True)
def test_a_container_finds_the_number_that_its_device_has_since_it_came_into_the_pod(claimed: Claimed) -> None:
    node = claimed.node
    (name, address), _ = claimed.two_vfs().items()
    uid = claim(claimed.port, "nics", POD, {"request": "nic", "device": name})
    create(node.stage, POD, ["nics"])
    pod = node.admitted("a")
    spec, prepared = SPECS / f"nodefabric-claim-{uid}.json", claimed.verbs_of(address)
    assert f"/dev/infiniband/{prepared}" in spec.read_text()

    sandbox = node.run(pod)
    assert prepared not in spec.read_text()
    claimed.check(node.start_container(pod, sandbox), "uverbs0", prepared)
    node.end(sandbox)
    node.forget(pod)
    assert settled(lambda: [*still_attached(node.stage), *specs()]) == []
