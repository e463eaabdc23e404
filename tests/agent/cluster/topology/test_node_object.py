from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from agent.cluster.apiserver import ApiServer, ObjectKind
from agent.cluster.topology.leaf_listener import LeafListener
from agent.cluster.topology.node_object import Bandwidth, NodeObject
from agent.cluster.topology.node_view import Intervals, View
from agent.cluster.topology.publisher import Problems
from agent.config.topology import LabelRule, Labels, Topology
from agent.hardware.lldp import Neighbour
from agent.model.device import Snapshot
from agent.process.conditions import Conditions
from agent.state import Latest
from tests.agent.cluster.publications import NOTHING_HELD, node_of
from tests.agent.cluster.topology.nodes import ONE, TWO
from tests.node import netdev

FIRMWARE = "example.com/firmware"
COUNT = "example.com/hcas"


class BareNode(ApiServer):
    """The API server of a node that has no labels of ours yet."""

    def metadata(self, kind: ObjectKind, name: str) -> dict[str, Any]:
        return {"uid": "uid-1"}


class EachItsOwn(LeafListener):
    """Each adapter ends at a switch of its own."""

    def __init__(self) -> None:
        return

    def at(self, nic: str) -> Neighbour:
        return Neighbour(f"chassis-{nic}", "port", f"leaf-{nic}")


def a_view(
    topology: Topology,
    snapshot: Latest[Snapshot],
    api: ApiServer | None = None,
    held: Mapping[str, str] = NOTHING_HELD,
) -> View:
    return View(topology, node_of(snapshot, held=held), api, Problems(Conditions()), Intervals(clock=lambda: 0.0))


def test_a_label_made_since_the_node_was_read_stays_while_its_adapter_is_in_a_pod() -> None:
    in_pod = replace(ONE, rdma_devices=tuple(replace(rdma, absent=True) for rdma in ONE.rdma_devices))
    snapshots = [Snapshot(devices=(ONE,)), Snapshot(devices=(in_pod,)), Snapshot(devices=(in_pod, TWO))]
    rules = (LabelRule(FIRMWARE, "hca-firmware"), LabelRule(COUNT, "hca-count"))

    async def scenario() -> list[Any]:
        cell = Latest(snapshots[0])
        view = a_view(Topology(labels=Labels(rules)), cell, BareNode(None))  # which is not read again meanwhile
        made = NodeObject(view, LeafListener(view), Bandwidth(1))
        found = []
        for snapshot in snapshots:
            cell.set(snapshot)
            found.append(await made.content())
        return [document["metadata"]["labels"] for document in found if document is not None]

    known = ONE.rdma_devices[0].fw_version
    assert asyncio.run(scenario()) == [
        {FIRMWARE: known, COUNT: "1"},
        {FIRMWARE: known, COUNT: "1"},
        {FIRMWARE: known, COUNT: "2"},
    ]


def test_the_switch_of_the_first_adapter_stays_the_nodes_while_its_interface_is_in_a_pod() -> None:
    first, second = (replace(nic, netdevs=(netdev(name),)) for nic, name in ((ONE, "ens1"), (TWO, "ens2")))
    held: dict[str, str] = {}
    snapshot = Snapshot(devices=(first, second))
    rules = (LabelRule("example.com/leaf", "leaf-switch"), LabelRule(COUNT, "hca-count"))

    def made() -> dict[str, str]:
        topology = Topology(labels=Labels(rules), lldp_netdevs=("ens1", "ens2"))
        a_new_agents = NodeObject(a_view(topology, Latest(snapshot), held=held), EachItsOwn(), Bandwidth(1))
        return asyncio.run(a_new_agents.labels({}))

    before = made()
    held, snapshot = {ONE.address: "ens1"}, Snapshot(devices=(replace(first, netdevs=()), second))
    assert made() == before
    assert before[COUNT] == "2"


@pytest.mark.parametrize("named", [(), ("ens1", "ens2")])
def test_labels_stay_while_the_driver_of_an_adapter_starts_anew(named: tuple[str, ...]) -> None:
    first, second = (replace(nic, netdevs=(netdev(name),)) for nic, name in ((ONE, "ens1"), (TWO, "ens2")))
    bare = replace(first, netdevs=(), rdma_devices=())
    for_programs = replace(bare, driver="vfio-pci")
    rules = [LabelRule("example.com/leaf", "leaf-switch"), LabelRule(COUNT, "hca-count")]
    rules.append(LabelRule("example.com/guid.{nic}", "node-guid"))

    topology = Topology(labels=Labels(tuple(rules)), lldp_netdevs=named)
    cell = Latest(Snapshot(devices=(first, second)))
    node = NodeObject(a_view(topology, cell), EachItsOwn(), Bandwidth(1))
    before = asyncio.run(node.labels({}))
    assert (before[COUNT], before["example.com/leaf"], len(before)) == ("2", f"leaf-{ONE.address}".replace(":", "-"), 4)
    for state in (replace(bare, driver=None), bare, first):
        cell.set(Snapshot(devices=(state, second)))
        assert asyncio.run(node.labels({})) == before
    cell.set(Snapshot(devices=(for_programs, second)))
    assert asyncio.run(node.labels({}))[COUNT] == "1"
