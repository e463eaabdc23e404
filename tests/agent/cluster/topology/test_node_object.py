from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from agent.cluster.topology.leaf_listener import LeafListener
from agent.cluster.topology.node_object import Bandwidth, NodeObject
from agent.cluster.topology.node_view import View
from agent.cluster.topology.publisher import Problems
from agent.config.topology import LabelRule, Labels, Topology
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
