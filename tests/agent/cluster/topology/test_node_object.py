"""What is written on the Node, and what is read of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agent.cluster.apiserver import ApiServer, ObjectKind
from agent.cluster.topology.leaf_listener import LeafListener
from agent.cluster.topology.node_object import Bandwidth, NodeObject
from agent.cluster.topology.node_view import RETRY_SECONDS, NodeMetadata, OwnNode, View
from agent.cluster.topology.publisher import Problems
from agent.config.topology import LabelRule, Labels, Topology
from agent.errors import Unavailable
from agent.hardware.lldp import Neighbour
from agent.model.device import PciDevice, Snapshot
from agent.process.conditions import Conditions
from agent.state import Latest
from tests.agent.cluster.publications import NOTHING_HELD, node_of
from tests.agent.cluster.topology.nodes import ONE, TWO
from tests.node import netdev

LEAF, COUNT, FIRMWARE = (f"example.com/{name}" for name in ("leaf", "hcas", "firmware"))
RULES = (
    LabelRule(LEAF, "leaf-switch"),
    LabelRule(COUNT, "hca-count"),
    LabelRule(FIRMWARE, "hca-firmware"),
    LabelRule("example.com/guid.{nic}", "node-guid"),
)
NAMED = ("ens1", "ens2")
FIRST, SECOND = (replace(nic, netdevs=(netdev(name),)) for nic, name in zip((ONE, TWO), NAMED, strict=True))
BARE = replace(FIRST, netdevs=(), rdma_devices=())
IN_POD = replace(FIRST, netdevs=(), rdma_devices=tuple(replace(rdma, absent=True) for rdma in FIRST.rdma_devices))


class EachItsOwn(LeafListener):
    """Each adapter ends at a switch of its own."""

    def __init__(self) -> None:
        return

    def at(self, nic: str) -> Neighbour:
        return Neighbour(f"chassis-{nic}", "port", f"leaf-{nic}")


class Life:
    """A node's labels, as its adapters come and go."""

    def __init__(self, named: tuple[str, ...], held: Mapping[str, str] = NOTHING_HELD) -> None:
        self.snapshot = Latest(Snapshot())
        topology = Topology(labels=Labels(RULES), lldp_netdevs=named)
        view = View(topology, node_of(self.snapshot, held=held), None, Problems(Conditions()))
        self.node = NodeObject(view, EachItsOwn(), Bandwidth(1))

    def labels(self, *devices: PciDevice) -> Mapping[str, str]:
        self.snapshot.set(Snapshot(devices=devices))
        return asyncio.run(self.node.labels({}))


@pytest.mark.parametrize("named", [(), NAMED])
@pytest.mark.parametrize("states", [(replace(BARE, driver=None), BARE, FIRST), (IN_POD,)])
def test_labels_stay_while_an_adapters_driver_starts_anew_or_it_is_in_a_pod(
    named: tuple[str, ...], states: Sequence[PciDevice]
) -> None:
    life = Life(named)
    before = life.labels(FIRST, SECOND)
    assert (before[COUNT], before[LEAF], len(before)) == ("2", f"leaf-{ONE.address}".replace(":", "-"), 5)
    assert [life.labels(state, SECOND) for state in states] == [before] * len(states)
    assert life.labels(replace(BARE, driver="vfio-pci"), SECOND)[COUNT] == "1"


def test_of_an_agent_that_starts_while_the_first_interface_is_in_a_pod_the_switch_is_the_same() -> None:
    before = Life(NAMED).labels(FIRST, SECOND)
    after = Life(NAMED, {ONE.address: "ens1"}).labels(replace(FIRST, netdevs=()), SECOND)
    assert (after[LEAF], after[COUNT]) == (before[LEAF], "2")


MINE = {
    "manager": "nodefabric",
    "operation": "Apply",
    "fieldsV1": {"f:metadata": {"f:labels": {"f:example.com/rails": {}}}},
}


class FakeApi(ApiServer):
    def __init__(self) -> None:
        self.calls = 0
        self.failing = False
        self.gate = threading.Event()

    def metadata(self, kind: ObjectKind, name: str) -> dict[str, Any]:
        self.calls += 1
        assert self.gate.wait(20)
        if self.failing:
            raise Unavailable("no answer")
        labels = {"example.com/rails": "8", "zone": "a"}
        return {"uid": f"uid-{self.calls}", "labels": labels, "managedFields": [MINE]}


async def test_it_is_read_once_for_all_that_ask_again_when_it_is_old_and_known_while_nobody_answers() -> None:
    now, api = 100.0, FakeApi()
    node = OwnNode(api, "worker-1", 600.0, lambda: now)
    asking = [asyncio.create_task(node.read()) for _ in range(3)]
    await asyncio.sleep(0)
    api.gate.set()
    known = NodeMetadata("uid-1", {"example.com/rails": "8"}, {})
    assert await asyncio.gather(*asking) == [known] * 3
    now += 599
    assert await node.read() == known
    assert api.calls == 1
    now, api.failing = now + 1, True
    for _ in range(2):
        assert await node.read() == known
    assert (node.problem, api.calls) == ("no answer", 2)
    now, api.failing = now + RETRY_SECONDS, False
    assert (await node.read() or known).uid == "uid-3"
    assert node.problem == ""
