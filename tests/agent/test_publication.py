"""All publications of one agent together, against a stand-in for the API server over real HTTP."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from agent.clients.apiserver import ApiServer
from agent.clients.kubelet import Allocatable, ContainerDevices, DeviceAssignment, PodDevices
from agent.config.labels import LabelRule, Labels
from agent.config.topology import Bandwidth, Fingerprint, Topology
from agent.errors import Unavailable
from agent.hardware import sysfs
from agent.metrics import Metrics
from agent.model.allocation import PodRef
from agent.model.device import LinkLayer, Netdev, Snapshot
from agent.publication import Publications
from agent.sim import definitions, recorded
from agent.sim.apiserver import ApiServerStandIn, Fault
from agent.sim.definitions import Definition
from agent.topology.fingerprint import fingerprint
from tests.agent.hardware.test_lldp import announcement, run, send
from tests.agent.topology.test_amounts import FakeUnit

QUICK = Topology(publish=True, coalesce_seconds=0.02, heartbeat_seconds=600, start_spread_seconds=0)
LEAF = "volcano.sh/tor"


class FakeInventory:
    """Hardware that the test changes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = replace(snapshot, generation=1)
        self._changed = asyncio.Event()

    def change(self, snapshot: Snapshot) -> None:
        self.snapshot = replace(snapshot, generation=self.snapshot.generation + 1)
        self._changed.set()

    async def newer_than(self, generation: int) -> Snapshot:
        while self.snapshot.generation <= generation:
            await self._changed.wait()
            self._changed.clear()
        return self.snapshot


class FakeKubelet:
    """Pods as the test says."""

    def __init__(self) -> None:
        self.pods: tuple[PodDevices, ...] = ()
        self.failing = False
        self.lists = 0

    async def list(self) -> tuple[PodDevices, ...]:
        self.lists += 1
        if self.failing:
            raise Unavailable("kubelet is away")
        return self.pods

    async def allocatable(self) -> Allocatable:
        return Allocatable()


def holding(name: str, unit: str) -> PodDevices:
    return PodDevices(PodRef("ns", name), (ContainerDevices("c", (DeviceAssignment("rdma/vf", (unit,)),)),))


@cache
def h100() -> Snapshot:
    with tempfile.TemporaryDirectory() as folder:
        recorded.unpack(recorded.load(Path("tests/nodes/h100-8gpu.json")), Path(folder))
        return sysfs.scan(Path(folder))


class Rig:
    """An agent's publications, with a node and a cluster around them."""

    def __init__(
        self,
        folder: Path,
        config: Topology,
        *,
        known: Iterable[Definition] | None = None,
        api: bool = True,
        hardware: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot,
        root: Path | None = None,
        server: ApiServerStandIn | None = None,
    ) -> None:
        """`hardware` changes what the node has; `server` is a cluster that is there already, and stays."""
        self.root = root or folder
        self.inventory = FakeInventory(hardware(h100() if root is None else sysfs.scan(root)))
        self.kubelet = FakeKubelet()
        self.units = {"rdma/vf": tuple(FakeUnit(f"u{n}", n % 2) for n in range(4))}
        self.stays = server is not None
        self.server = server or ApiServerStandIn(known=known, bookmark_seconds=0.1)
        (folder / "kubeconfig").write_text(self.server.kubeconfig())
        self.client = ApiServer.from_kubeconfig(folder / "kubeconfig")
        self.registry = CollectorRegistry()
        self.complaints: list[str | None] = []
        (folder / "config.yaml").write_text("topologyManagerPolicy: single-numa-node\n")
        self.publications = Publications(
            replace(config, kubelet_config=folder / "config.yaml"),
            "worker-1",
            self.root,
            self.inventory,
            self.kubelet,
            lambda: self.units,
            Metrics(self.registry),
            self.client if api else None,
            self.complaints.append,
        )

    async def __aenter__(self) -> Rig:
        self.task = asyncio.create_task(self.publications.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        self.client.close()
        if not self.stays:
            await asyncio.to_thread(self.server.close)

    def stored(self, kind: str = "NodeResourceTopology") -> dict[str, Any]:
        return self.server.state.get(kind, "worker-1") or {}

    def fingerprint(self) -> str | None:
        found = {item["name"]: item["value"] for item in self.stored().get("attributes", ())}
        return found.get("nodeTopologyPodsFingerprint")

    def available(self) -> list[str]:
        zones = self.stored().get("zones", ())
        return [r["available"] for zone in zones for r in zone["resources"] if r["name"] == "rdma/vf"]

    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.stored("Node").get("metadata", {}).get("labels", {})
        return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 -- conditions are about other threads
            await asyncio.sleep(0.01)


def labelled(*rules: LabelRule, **changes: Any) -> Topology:
    return replace(QUICK, publish=False, labels=Labels(rules, **changes))


def test_the_object_follows_units_and_pods_and_belongs_to_the_node(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Rig(tmp_path, QUICK) as rig:
            uid = rig.server.state.add_node("worker-1")
            rig.server.state.put_pod("worker-1", "ns", "old", "Succeeded")
            await until(lambda: rig.available() == ["2", "2"])
            await until(lambda: rig.fingerprint() == fingerprint([("ns", "old")]))
            rig.kubelet.pods = (holding("a", "u0"),)
            rig.server.state.put_pod("worker-1", "ns", "a", "Running")
            await until(lambda: rig.fingerprint() == fingerprint([("ns", "old"), ("ns", "a")]))
            assert rig.available() == ["1", "2"]
            await until(lambda: rig.stored()["metadata"].get("ownerReferences", [{}])[0].get("uid") == uid)
            rig.units = {"rdma/vf": rig.units["rdma/vf"][:3]}
            rig.publications.changed()
            await until(lambda: rig.available() == ["1", "1"])
            assert rig.server.state.counts.lists == 1

    asyncio.run(scenario())


def test_a_pod_that_waits_changes_nothing_and_rest_is_silence(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Rig(tmp_path, QUICK) as rig:
            rig.server.state.add_node("worker-1")
            await until(lambda: rig.server.state.counts.applies == 1)
            built = rig.kubelet.lists
            rig.server.state.put_pod("worker-1", "ns", "a", "Pending")
            await until(lambda: rig.kubelet.lists > built)
            await asyncio.sleep(0.2)
            assert rig.server.state.counts.applies == 1
            assert rig.server.state.counts.reads <= 2  # the Node, and this test's own

    asyncio.run(scenario())


def test_without_the_right_to_watch_pods_kubelets_word_is_taken_and_it_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, QUICK)
        rig.server.state.set_fault(Fault(status=403, path="/api/v1/pods"))
        rig.kubelet.pods = (holding("a", "u0"),)
        async with rig:
            await until(lambda: rig.fingerprint() == fingerprint([("ns", "a")]))
            assert any("pods of the node cannot be watched" in str(text) for text in rig.complaints)

    asyncio.run(scenario())


def test_with_podresources_nothing_is_watched(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = replace(QUICK, fingerprint=Fingerprint("podresources"))
        async with Rig(tmp_path, config) as rig:
            rig.kubelet.pods = (holding("a", "u0"),)
            rig.publications.changed()
            await until(lambda: rig.fingerprint() == fingerprint([("ns", "a")]))
            counts = rig.server.state.counts
            assert (counts.lists, counts.watches) == (0, 0)

    asyncio.run(scenario())


def test_a_kubelet_that_is_away_is_said_and_nothing_is_published_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, replace(QUICK, fingerprint=Fingerprint("podresources")))
        rig.kubelet.failing = True
        async with rig:
            await until(lambda: rig.complaints == ["NodeResourceTopology cannot be published: kubelet is away"])
            assert rig.server.state.counts.applies == 0
            rig.kubelet.failing = False
            await until(lambda: rig.server.state.counts.applies == 1)
            await until(lambda: rig.complaints[-1] is None)

    asyncio.run(scenario())


def test_numatopology_goes_without_what_an_older_volcano_does_not_know(tmp_path: Path) -> None:
    older = [d.lacking("spec", "podAllocations") if d.kind == "Numatopology" else d for d in definitions.load()]

    async def scenario() -> None:
        config = replace(QUICK, publish=False, volcano=True)
        async with Rig(tmp_path, config, known=older) as rig:
            await until(lambda: rig.stored("Numatopology") != {})
            spec = rig.stored("Numatopology")["spec"]
            assert "podAllocations" not in spec
            assert spec["policies"] == {"CPUManagerPolicy": "none", "TopologyManagerPolicy": "single-numa-node"}
            assert len(spec["cpuDetail"]) == 224
            await until(lambda: rig.complaints[-1] is None)

    asyncio.run(scenario())


def test_numatopology_lists_pods_where_volcano_knows_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Rig(tmp_path, replace(QUICK, publish=False, volcano=True)) as rig:
            rig.kubelet.pods = (PodDevices(PodRef("ns", "a"), (ContainerDevices("c", (), (2, 3)),)),)
            rig.publications.changed()
            await until(lambda: rig.stored("Numatopology").get("spec", {}).get("podAllocations", []) != [])
            assert rig.server.state.counts.watches == 0

    asyncio.run(scenario())


def test_labels_are_applied_beside_those_of_others_and_taken_back_when_they_are_not_wanted(tmp_path: Path) -> None:
    rules = (LabelRule("example.com/rails", "rails"), LabelRule("example.com/hca", "hca-model"))

    async def scenario(config: Topology, wanted: dict[str, str], server: ApiServerStandIn) -> None:
        async with Rig(tmp_path, config, server=server) as rig:
            mine = {"kubernetes.io/hostname": "worker-1", "zone": "a", **wanted}
            await until(lambda: rig.labels() == mine)

    with ApiServerStandIn() as server:
        server.state.add_node("worker-1", {"zone": "a"})
        both = {"example.com/rails": "8", "example.com/hca": "ConnectX-7"}
        asyncio.run(scenario(labelled(*rules), both, server))
        asyncio.run(scenario(labelled(rules[0]), {"example.com/rails": "8"}, server))
        asyncio.run(scenario(replace(QUICK, labels=Labels()), {}, server))


def test_a_label_that_somebody_else_has_set_stays_his_and_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        rules = (LabelRule("example.com/rails", "rails"), LabelRule("example.com/gpus", "gpu-count"))
        rig = Rig(tmp_path, labelled(*rules))
        rig.server.state.add_node("worker-1")
        theirs = {"metadata": {"labels": {"example.com/rails": "many"}}}
        rig.server.state.apply("Node", "worker-1", theirs, "kubectl-label", force=False)
        async with rig:
            await until(lambda: rig.labels().get("example.com/gpus") == "8")
            assert rig.labels()["example.com/rails"] == "many"
            said = "kubectl-label writes .metadata.labels.example.com/rails of this node's Node too"
            await until(lambda: any(said in str(text) for text in rig.complaints))

    asyncio.run(scenario())


def test_the_feature_file_takes_labels_without_any_api_server(tmp_path: Path) -> None:
    path = tmp_path / "features.d" / "nodefabric"
    path.parent.mkdir()

    async def scenario() -> None:
        config = labelled(LabelRule("example.com/rails", "rails"), to="nfd", nfd_file=path)
        async with Rig(tmp_path, config, api=False) as rig:
            await until(path.exists)
            assert "example.com/rails=8\n" in path.read_text()
            assert rig.server.state.counts.applies == 0

    asyncio.run(scenario())


def test_a_feature_folder_that_is_missing_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = labelled(LabelRule("example.com/rails", "rails"), to="nfd", nfd_file=tmp_path / "no/nodefabric")
        async with Rig(tmp_path, config, api=False) as rig:
            await until(lambda: "mount the folder of NFD's features" in str(rig.complaints))

    asyncio.run(scenario())


@pytest.fixture
def cable(own_network: None) -> None:
    """The first adapter's interface, whose other end is a port of a switch."""
    run("ip", "link", "add", "nic0", "type", "veth", "peer", "name", "port0")
    run("ip", "link", "set", "nic0", "up")
    run("ip", "link", "set", "port0", "up")


def with_cable(snapshot: Snapshot) -> Snapshot:
    """Give the first adapter an interface that is there."""
    first = next(device for device in snapshot.devices if device.rdma_devices and not device.is_vf)
    netdev = Netdev("nic0", socket.if_nametoindex("nic0"), "", 1500, "up", True, LinkLayer.ETHERNET, None)
    devices = tuple(replace(d, netdevs=(netdev,)) if d == first else d for d in snapshot.devices)
    return replace(snapshot, devices=devices)


def test_the_leaf_switch_is_learnt_from_its_frames_and_stays_when_it_is_silent(tmp_path: Path, cable: None) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, labelled(LabelRule(LEAF, "leaf-switch")), hardware=with_cable)
        rig.server.state.add_node("worker-1")
        async with rig:
            await until(lambda: "01:80:c2:00:00:0e" in run("ip", "maddress", "show", "dev", "nic0"))
            send("port0", b"\x01\x80\xc2\x00\x00\x0e" + b"\x02" * 6 + b"\x88\xcc" + b"nonsense", announcement("leaf-a"))
            await until(lambda: rig.labels().get(LEAF) == "leaf-a")
            rig.inventory.change(replace(rig.inventory.snapshot, devices=()))  # the adapter went into a pod
            await until(lambda: "01:80:c2:00:00:0e" not in run("ip", "maddress", "show", "dev", "nic0"))
            applies = rig.server.state.counts.applies
            await asyncio.sleep(0.2)
            assert rig.server.state.counts.applies == applies
            assert rig.labels()[LEAF] == "leaf-a"

    asyncio.run(scenario())


def test_after_a_restart_a_label_stays_until_the_switch_has_spoken(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, labelled(LabelRule(LEAF, "leaf-chassis"), LabelRule("example.com/rails", "rails")))
        rig.server.state.add_node("worker-1")
        rig.server.state.apply(
            "Node", "worker-1", {"metadata": {"labels": {LEAF: "leaf-a"}}}, "nodefabric", force=False
        )
        async with rig:
            await until(lambda: rig.labels().get("example.com/rails") == "8")
            assert rig.labels()[LEAF] == "leaf-a"

    asyncio.run(scenario())


def test_the_bandwidth_is_a_gauge_and_the_load_an_annotation(tmp_path: Path) -> None:
    counters = "sys/class/infiniband/mlx5_0/ports/1/counters"

    async def scenario() -> None:
        bandwidth = Bandwidth(0.05, "nodefabric.io/port-load", 0.3)
        root = tmp_path / "root"
        recorded.unpack(recorded.load(Path("tests/nodes/h100-8gpu.json")), root)
        rig = Rig(tmp_path, replace(QUICK, publish=False, bandwidth=bandwidth), root=root)
        rig.server.state.add_node("worker-1")
        (rig.root / counters).mkdir()
        passed = 0

        def pass_on() -> None:
            nonlocal passed
            passed += 10**9
            for name in ("port_rcv_data", "port_xmit_data"):
                temporary = rig.root / counters / f".{name}"
                temporary.write_text(f"{passed}\n")
                temporary.rename(rig.root / counters / name)

        def load() -> str | None:
            pass_on()
            found: dict[str, str] = rig.stored("Node")["metadata"].get("annotations", {})
            return found.get("nodefabric.io/port-load")

        async with rig:
            await until(lambda: load() == '{"mlx5_0":100}')
            labels = {"device": "0000:18:00.0", "name": "mlx5_0", "port": "1", "traffic": "rdma"}
            name = "nodefabric_port_receive_bytes_per_second"
            assert (rig.registry.get_sample_value(name, labels) or 0) > 1e9
            assert rig.registry.get_sample_value("nodefabric_port_speed_bytes_per_second", labels) == 50e9

    asyncio.run(scenario())


def test_what_has_ended_tells_nothing_any_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, QUICK)
        rig.kubelet.failing = True
        async with rig:
            await until(lambda: bool(rig.complaints))
            assert any(family.name.startswith("nodefabric_port_") for family in rig.registry.collect())
        assert rig.complaints[-1] is None
        assert not any(family.name.startswith("nodefabric_port_") for family in rig.registry.collect())

    asyncio.run(scenario())


def test_a_silent_api_server_holds_up_neither_the_loop_nor_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, replace(QUICK, volcano=True))
        rig.server.state.set_fault(Fault(delay_seconds=30))
        async with rig:
            for _ in range(20):
                rig.publications.changed()
                await asyncio.sleep(0.005)
        assert rig.server.state.counts.applies == 0

    asyncio.run(scenario())
