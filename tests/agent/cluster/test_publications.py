"""All publications of one agent together, against a stand-in for the API server over real HTTP."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from agent.cluster.publications import Republication
from agent.cluster.topology.node_view import FORGETFUL_SECONDS
from agent.cluster.topology.noderesourcetopology import fingerprint
from agent.config import Config
from agent.config.topology import Bandwidth, Fingerprint
from agent.hardware import recorded
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, PodDevices
from agent.model.allocation import PodRef
from agent.model.counters import VfCounters
from agent.offer.offer import Offer
from agent.process.conditions import Conditions
from agent.report.metrics import Metrics
from agent.state import Latest
from hack.sim.cluster import definitions
from hack.sim.cluster.apiserver import Fault
from tests.agent.cluster.publications import BRISK, QUICK, FakeKubelet, Rig
from tests.awaiting import until

SAMPLED = replace(BRISK, sample=0.05, annotation=0.3)


def holding(name: str, unit: str) -> PodDevices:
    return PodDevices(PodRef("ns", name), (ContainerDevices("c", (DeviceAssignment("rdma/vf", (unit,)),)),))


async def test_the_object_follows_units_and_pods_and_belongs_to_the_node(tmp_path: Path) -> None:
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
        rig.offer({"rdma/vf": rig.node.offer.value.units["rdma/vf"][:3]})
        rig.publications.changed()
        await until(lambda: rig.available() == ["1", "1"])
        assert rig.server.state.counts.lists == 1


async def test_a_node_whose_devices_are_not_known_yet_is_not_told_as_one_without(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(QUICK, fingerprint=Fingerprint("podresources")))
    offer = rig.node.offer.value
    rig.node.offer.set(Offer())
    async with rig:
        rig.publications.changed()
        await asyncio.sleep(0.3)
        assert rig.stored() == {}
        rig.node.offer.set(offer)
        rig.publications.changed()
        await until(lambda: rig.available() == ["2", "2"])


def test_what_pods_hold_is_not_told_as_free_by_a_kubelet_that_has_just_started(tmp_path: Path) -> None:
    """It knows static pods first. With a watch of pods the fingerprint would be right, and the scheduler believe it."""
    asking = {"spec": {"containers": [{"resources": {"requests": {"rdma/vf": "1"}}}]}}
    later = 0.0

    async def scenario() -> None:
        nonlocal later
        async with Rig(tmp_path, QUICK, intervals=replace(BRISK, clock=lambda: time.monotonic() + later)) as rig:
            rig.server.state.add_node("worker-1")
            rig.kubelet.pods = (holding("a", "u0"),)
            rig.server.state.put_pod("worker-1", "ns", "a", "Running", **asking)
            await until(lambda: rig.available() == ["1", "2"])
            rig.kubelet.pods = (PodDevices(PodRef("kube-system", "proxy")),)
            lists = rig.kubelet.lists
            rig.publications.changed()
            await until(lambda: rig.kubelet.lists > lists)
            await asyncio.sleep(0.2)
            assert rig.available() == ["1", "2"]
            rig.kubelet.pods = (holding("a", "u0"), holding("b", "u1"))
            rig.publications.changed()
            await until(lambda: rig.available() == ["1", "1"])
            # Which of the two is right, if they never agree, nobody can tell: kubelet gives out the devices.
            rig.kubelet.pods, lists = (), rig.kubelet.lists
            rig.publications.changed()
            await until(lambda: rig.kubelet.lists > lists)
            await asyncio.sleep(0.2)
            assert rig.available() == ["1", "1"]
            later = FORGETFUL_SECONDS
            rig.publications.changed()
            await until(lambda: rig.available() == ["2", "2"])

    asyncio.run(scenario())


async def test_an_object_of_no_node_is_said(tmp_path: Path) -> None:
    async with Rig(tmp_path, QUICK) as rig:
        await until(lambda: rig.server.state.counts.applies == 1)
        assert "ownerReferences" not in rig.stored()["metadata"]
        await until(lambda: "what is published has no owner: GET /api/v1/nodes/worker-1" in str(rig.complaints))


async def test_a_pod_that_waits_changes_nothing_and_rest_is_silence(tmp_path: Path) -> None:
    async with Rig(tmp_path, QUICK) as rig:
        rig.server.state.add_node("worker-1")
        await until(lambda: rig.server.state.counts.applies == 1)
        built = rig.kubelet.lists
        rig.server.state.put_pod("worker-1", "ns", "a", "Pending")
        await until(lambda: rig.kubelet.lists > built)
        await asyncio.sleep(0.2)
        assert rig.server.state.counts.applies == 1
        assert rig.server.state.counts.reads <= 2  # the Node, and this test's own


async def test_without_the_right_to_watch_pods_kubelets_word_is_taken_and_it_is_said(tmp_path: Path) -> None:
    rig = Rig(tmp_path, QUICK)
    rig.server.state.set_fault(Fault(status=403, path="/api/v1/pods"))
    rig.kubelet.pods = (holding("a", "u0"),)
    async with rig:
        await until(lambda: rig.fingerprint() == fingerprint([("ns", "a")]))
        assert any("pods of the node cannot be watched" in str(text) for text in rig.complaints)


async def test_with_podresources_nothing_is_watched(tmp_path: Path) -> None:
    config = replace(QUICK, fingerprint=Fingerprint("podresources"))
    async with Rig(tmp_path, config) as rig:
        rig.kubelet.pods = (holding("a", "u0"),)
        rig.publications.changed()
        await until(lambda: rig.fingerprint() == fingerprint([("ns", "a")]))
        counts = rig.server.state.counts
        assert (counts.lists, counts.watches) == (0, 0)


async def test_a_kubelet_that_is_away_is_said_and_nothing_is_published_meanwhile(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(QUICK, fingerprint=Fingerprint("podresources")))
    rig.server.state.add_node("worker-1")
    rig.kubelet.failing = True
    async with rig:
        await until(lambda: rig.complaints == ["NodeResourceTopology cannot be published: kubelet is away"])
        assert rig.server.state.counts.applies == 0
        rig.kubelet.failing = False
        await until(lambda: rig.server.state.counts.applies == 1)
        await until(lambda: rig.complaints[-1] is None)


async def test_a_policy_that_cannot_be_read_is_said_while_schedulers_are_told_the_default(tmp_path: Path) -> None:
    rig = Rig(tmp_path, QUICK)
    rig.server.state.add_node("worker-1")
    (tmp_path / "config.yaml").write_text("topologyManagerPolicy: [")
    async with rig:
        await until(lambda: rig.stored().get("topologyPolicies") == ["None"])
        assert "taking kubelet's defaults" in str(rig.complaints[-1])
        (tmp_path / "config.yaml").write_text("topologyManagerPolicy: single-numa-node\n")
        rig.publications.changed()
        await until(lambda: rig.stored().get("topologyPolicies") == ["SingleNUMANodeContainerLevel"])
        await until(lambda: rig.complaints[-1] is None)


async def test_numatopology_goes_without_what_an_older_volcano_does_not_know(tmp_path: Path) -> None:
    older = [d.lacking("spec", "podAllocations") if d.kind == "Numatopology" else d for d in definitions.load()]
    rig = Rig(tmp_path, replace(QUICK, publish=False, volcano=True), known=older)
    rig.server.state.add_node("worker-1")
    async with rig:
        await until(lambda: rig.stored("Numatopology") != {})
        spec = rig.stored("Numatopology")["spec"]
        assert "podAllocations" not in spec
        assert spec["policies"] == {"CPUManagerPolicy": "none", "TopologyManagerPolicy": "single-numa-node"}
        assert len(spec["cpuDetail"]) == 224
        await until(lambda: rig.complaints[-1] is None)


async def test_the_bandwidth_of_a_port_and_of_its_vfs_is_a_gauge_and_the_load_an_annotation(tmp_path: Path) -> None:
    passed = count(step=10**10)

    def vf_counters() -> tuple[VfCounters, ...]:
        return (VfCounters("0000:18:00.1", "ens1f0np0", 0, 0, {"rx_bytes": next(passed), "tx_bytes": 0}),)

    def gauge(direction: str, traffic: str) -> float | None:
        labels = {"device": "0000:18:00.0", "name": "mlx5_0", "port": "1", "traffic": traffic}
        return rig.registry.get_sample_value(f"nodefabric_port_{direction}_bytes_per_second", labels)

    def load() -> str | None:
        for name in ("port_rcv_data", "port_xmit_data"):
            temporary = counters / f".{name}"
            temporary.write_text(f"{next(passed)}\n")
            temporary.rename(counters / name)
        found: dict[str, str] = rig.stored("Node")["metadata"].get("annotations", {})
        return found.get("nodefabric.io/port-load")

    root = tmp_path / "root"
    recorded.unpack(recorded.load(Path("tests/nodes/h100-8gpu.json")), root)
    counters = root / "sys/class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir()
    config = replace(QUICK, publish=False, bandwidth=Bandwidth("nodefabric.io/port-load"))
    held = {"0000:18:00.1": "ens1f0v0"}
    rig = Rig(tmp_path, config, root=root, vf_counters=vf_counters, held=held, intervals=SAMPLED)
    rig.server.state.add_node("worker-1")
    async with rig:
        await until(lambda: load() == '{"mlx5_0":100}')
        assert min(gauge("receive", "rdma") or 0, gauge("receive", "vf") or 0) > 1e9
        assert gauge("speed", "rdma") == 50e9


async def test_what_has_ended_tells_nothing_any_more(tmp_path: Path) -> None:
    rig = Rig(tmp_path, QUICK)
    rig.kubelet.failing = True
    async with rig:
        await until(lambda: bool(rig.complaints))
        assert any(family.name.startswith("nodefabric_port_") for family in rig.registry.collect())
    assert rig.complaints[-1] is None
    assert not any(family.name.startswith("nodefabric_port_") for family in rig.registry.collect())


async def test_another_configuration_ends_one_and_begins_the_next(tmp_path: Path) -> None:
    rig = Rig(tmp_path, QUICK)
    rig.server.state.add_node("worker-1")
    topology = replace(QUICK, kubelet_config=tmp_path / "config.yaml")
    config, registry = Latest(Config(topology=topology)), CollectorRegistry()
    publishing = Republication(config, rig.node, rig.client, Metrics(registry), Conditions())
    running = asyncio.create_task(publishing.run())
    await until(rig.stored)
    config.set(Config(topology=replace(topology, publish=False, volcano=True)))
    await until(lambda: rig.stored("Numatopology"))
    asked = rig.kubelet.lists
    publishing.changed()
    await until(lambda: rig.kubelet.lists > asked)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(family.name.startswith("nodefabric_port_") for family in registry.collect())
    rig.client.close()
    rig.server.close()


async def test_an_error_that_nobody_expected_ends_them_and_they_may_be_run_again(tmp_path: Path) -> None:
    class Broken(FakeKubelet):
        async def list(self) -> tuple[PodDevices, ...]:
            raise ZeroDivisionError("a bug")

    rig = Rig(tmp_path, QUICK)
    rig.node = replace(rig.node, kubelet=Broken())
    topology = replace(QUICK, fingerprint=Fingerprint("podresources"))
    publishing = Republication(
        Latest(Config(topology=topology)), rig.node, rig.client, Metrics(CollectorRegistry()), Conditions()
    )
    for _ in range(2):
        with pytest.raises(ExceptionGroup):
            await publishing.run()
    rig.client.close()
    rig.server.close()
