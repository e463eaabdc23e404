from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.clients.apiserver import ObjectKind
from agent.config.labels import LabelRule, Labels
from agent.config.topology import Topology
from agent.model.device import Snapshot
from agent.model.lldp import Neighbour
from agent.topology.node_object import NodeObject
from agent.topology.own_node import OwnNode
from tests.agent.topology.adapters import ONE, TWO
from tests.deviceplugin.machines import netdev

FIRMWARE = "example.com/firmware"
COUNT = "example.com/hcas"


class BareNode:
    """The API server of a node that has no labels of ours yet."""

    def metadata(self, kind: ObjectKind, name: str) -> dict[str, Any]:
        return {"uid": "uid-1"}


def test_a_label_made_since_the_node_was_read_stays_while_its_adapter_is_in_a_pod() -> None:
    in_pod = replace(ONE, rdma_devices=tuple(replace(rdma, absent=True) for rdma in ONE.rdma_devices))
    snapshots = [Snapshot(devices=(ONE,)), Snapshot(devices=(in_pod,)), Snapshot(devices=(in_pod, TWO))]
    rules = (LabelRule(FIRMWARE, "hca-firmware"), LabelRule(COUNT, "hca-count"))

    async def scenario() -> list[Any]:
        made = NodeObject(
            Topology(labels=Labels(rules)),
            "worker-1",
            Path("/"),
            lambda: snapshots[0],
            lambda nic: None,
            lambda present: None,
        )
        node = OwnNode(BareNode(), "worker-1", 600.0, lambda: 0.0)  # it is not read again while this lasts
        found = []
        while snapshots:
            found.append(await made.build(node))
            snapshots.pop(0)
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

    def at(nic: str) -> Neighbour:
        return Neighbour(f"chassis-{nic}", "port", f"leaf-{nic}")

    def made() -> dict[str, str]:
        topology = Topology(labels=Labels(rules), lldp_netdevs=("ens1", "ens2"))
        a_new_agents = NodeObject(topology, "n", Path("/"), lambda: snapshot, at, lambda _: None, lambda: held)
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
    snapshot = Snapshot(devices=(first, second))
    rules = [LabelRule("example.com/leaf", "leaf-switch"), LabelRule(COUNT, "hca-count")]
    rules.append(LabelRule("example.com/guid.{nic}", "node-guid"))

    def at(nic: str) -> Neighbour:
        return Neighbour(f"chassis-{nic}", "port", f"leaf-{nic}")

    topology = Topology(labels=Labels(tuple(rules)), lldp_netdevs=named)
    node = NodeObject(topology, "n", Path("/"), lambda: snapshot, at, lambda _: None)
    before = asyncio.run(node.labels({}))
    assert (before[COUNT], before["example.com/leaf"], len(before)) == ("2", f"leaf-{ONE.address}".replace(":", "-"), 4)
    for state in (replace(bare, driver=None), bare, first):
        snapshot = Snapshot(devices=(state, second))
        assert asyncio.run(node.labels({})) == before
    snapshot = Snapshot(devices=(for_programs, second))
    assert asyncio.run(node.labels({}))[COUNT] == "1"
