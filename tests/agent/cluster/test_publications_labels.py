"""Labels of the node, and the leaf switch among them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from agent.cluster.apiserver import ApiServer, ObjectKind
from agent.cluster.publications import Publications
from agent.cluster.topology.node_view import Intervals
from agent.config.topology import LabelRule, Labels, Topology
from agent.errors import Unavailable
from agent.model.device import LinkLayer, Netdev, Snapshot
from agent.process.conditions import Conditions
from agent.report.metrics import Metrics
from agent.state import Latest
from hack.sim.cluster.api_state import Fault
from hack.sim.cluster.apiserver import ApiServerStandIn
from tests.agent.cluster.publications import BRISK, QUICK, Rig, h100, node_of
from tests.agent.hardware.frames import announcement, await_up, run, send
from tests.awaiting import until

LEAF = "volcano.sh/tor"


def labelled(*rules: LabelRule) -> Topology:
    return replace(QUICK, publish=False, labels=Labels(rules))


async def label(folder: Path, server: ApiServerStandIn, config: Topology, *wanted: tuple[str, str]) -> None:
    """Run an agent until the Node has these labels of ours."""
    async with Rig(folder, config, server=server) as rig:
        await until(lambda: rig.labels() == {"kubernetes.io/hostname": "worker-1", "zone": "a", **dict(wanted)})


async def test_labels_are_applied_beside_those_of_others_and_taken_back_when_they_are_not_wanted(
    server: ApiServerStandIn, tmp_path: Path
) -> None:
    (tmp_path / "rack").write_text("r17\nmore\n")
    rack = LabelRule("example.com/rack", "file", path=Path("/rack"))
    rules = (LabelRule("example.com/rails", "rails"), LabelRule("example.com/hca", "hca-model"), rack)
    server.state.add_node("worker-1", {"zone": "a"})
    hca = ("example.com/hca", "ConnectX-7")
    await label(tmp_path, server, labelled(*rules), RAILS, hca, ("example.com/rack", "r17"))
    await label(tmp_path, server, labelled(rules[0]), RAILS)
    await label(tmp_path, server, QUICK)


RAILS = ("example.com/rails", "8")
RAILS_ALONE = labelled(LabelRule("example.com/rails", "rails"))


async def test_labels_that_may_not_be_taken_back_any_more_are_no_lasting_problem(
    server: ApiServerStandIn, tmp_path: Path
) -> None:
    server.state.add_node("worker-1", {"zone": "a"})
    await label(tmp_path, server, RAILS_ALONE, RAILS)
    server.state.set_fault(Fault(status=403, path="/api/v1/nodes/worker-1?fieldManager"))
    async with Rig(tmp_path, QUICK, server=server) as rig:
        await until(lambda: len(rig.complaints) > 1)
        assert "Node cannot be published" in str(rig.complaints[0])
        await until(lambda: rig.complaints[-1] is None)
        rig.change(rig.snapshot.value)
        await asyncio.sleep(0.2)
        assert rig.complaints[-1] is None
        assert RAILS in rig.labels().items()


@pytest.mark.parametrize("status", [401, 404, 409])
async def test_labels_are_taken_back_after_a_refusal_that_passes(
    server: ApiServerStandIn, tmp_path: Path, status: int
) -> None:
    server.state.add_node("worker-1", {"zone": "a"})
    await label(tmp_path, server, RAILS_ALONE, RAILS)
    server.state.set_fault(Fault(status=status, path="/api/v1/nodes/worker-1?fieldManager", times=1))
    await label(tmp_path, server, QUICK)


def test_a_server_that_never_tells_of_the_node_is_spared() -> None:
    now, asked = 0.0, []

    class NoAnswer(ApiServer):
        def metadata(self, kind: ObjectKind, name: str) -> dict[str, Any]:
            asked.append(now)
            raise Unavailable("no route to host")

    async def pass_an_hour() -> None:
        nonlocal now
        publications = Publications(
            labelled(LabelRule("example.com/rails", "rails")),
            node_of(Latest(h100())),
            NoAnswer(None),
            Metrics(CollectorRegistry()),
            Conditions(),
            Intervals(clock=lambda: now),
        )
        while now < 3600:
            now = await publications.step(now)

    asyncio.run(pass_an_hour())
    assert 10 < len(asked) < 20
    assert asked[-1] - asked[-2] > 200


@pytest.fixture
def cable(own_network: None) -> None:
    """The first adapter's interface, whose other end is a port of a switch."""
    run("ip", "link", "add", "nic0", "type", "veth", "peer", "name", "port0")
    run("ip", "link", "set", "nic0", "up")
    run("ip", "link", "set", "port0", "up")
    await_up("nic0", "port0")


def with_cable(snapshot: Snapshot) -> Snapshot:
    """Give the first adapter an interface that is there."""
    first = next(device for device in snapshot.devices if device.rdma_devices and not device.is_vf)
    netdev = Netdev("nic0", socket.if_nametoindex("nic0"), "", 1500, "up", True, LinkLayer.ETHERNET, None)
    devices = tuple(replace(d, netdevs=(netdev,)) if d == first else d for d in snapshot.devices)
    return replace(snapshot, devices=devices)


class Switch:
    """What speaks at the other end of the cable, and a clock on which half a minute passes with each word."""

    def __init__(self) -> None:
        self._passed = 0.0

    def now(self) -> float:
        return time.monotonic() + self._passed

    async def speak(self, *names: str, until_told: Callable[[], bool]) -> None:
        """Announce names in turn, until something is told."""
        async with asyncio.timeout(60):
            while not until_told():
                for name in names:
                    send("port0", b"\x01\x80\xc2\x00\x00\x0e" + b"\x02" * 6 + b"\x88\xcc" + b"nonsense")
                    send("port0", announcement(name))
                self._passed += 30
                await asyncio.sleep(2 * BRISK.rest)


def cabled(folder: Path, switch: Switch) -> Rig:
    intervals = replace(BRISK, clock=switch.now)
    rig = Rig(folder, labelled(LabelRule(LEAF, "leaf-switch")), hardware=with_cable, intervals=intervals)
    rig.server.state.add_node("worker-1")
    return rig


def listens() -> bool:
    return "01:80:c2:00:00:0e" in run("ip", "maddress", "show", "dev", "nic0")


async def test_the_leaf_switch_is_learnt_from_its_frames_not_from_a_flood_and_stays_when_it_is_silent(
    tmp_path: Path, cable: None
) -> None:
    switch = Switch()
    async with cabled(tmp_path, switch) as rig:
        await until(listens)
        send("port0", *[announcement("pod")] * 200)  # in one go: the loop has not run meanwhile
        await switch.speak("leaf-a", until_told=lambda: LEAF in rig.labels())
        assert rig.labels()[LEAF] == "leaf-a"
        assert [leaf.system_name for leaf in rig.node.leaves.value.values()] == ["leaf-a"]
        rig.change(replace(rig.snapshot.value, devices=()))  # the adapter went into a pod
        await until(lambda: not listens())
        applies = rig.server.state.counts.applies
        await asyncio.sleep(0.2)
        assert rig.server.state.counts.applies == applies
        assert rig.labels()[LEAF] == "leaf-a"


async def test_whoever_speaks_first_after_a_restart_changes_no_label_and_two_in_turn_are_told(
    tmp_path: Path, cable: None
) -> None:
    switch = Switch()
    rig = cabled(tmp_path, switch)
    rig.server.state.apply("Node", "worker-1", {"metadata": {"labels": {LEAF: "leaf-a"}}}, "nodefabric", force=False)
    async with rig:
        await until(listens)
        changes = iter(range(6))
        await switch.speak("pod", "leaf-a", until_told=lambda: next(changes, None) is None)
        assert rig.labels()[LEAF] == "leaf-a"
        told = rig.complaints[-1] or ""
        assert "several speak LLDP on the link of 0000:18:00.0 (" in told
        assert "pod, port eth1" in told
        await switch.speak("leaf-b", until_told=lambda: rig.labels()[LEAF] == "leaf-b")
        assert rig.complaints[-1] is None


async def test_after_a_restart_a_label_stays_until_the_switch_has_spoken(tmp_path: Path) -> None:
    rig = Rig(tmp_path, labelled(LabelRule(LEAF, "leaf-chassis"), LabelRule("example.com/rails", "rails")))
    rig.server.state.add_node("worker-1")
    rig.server.state.apply("Node", "worker-1", {"metadata": {"labels": {LEAF: "leaf-a"}}}, "nodefabric", force=False)
    async with rig:
        await until(lambda: rig.labels().get("example.com/rails") == "8")
        assert rig.labels()[LEAF] == "leaf-a"
