"""The driver is there while a resource is for claims or a claim is left, and not otherwise."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from agent.cluster.apiserver import ApiServer
from agent.cluster.claim_objects import attached
from agent.config import Config, Resource, Topology
from agent.config.topology import LabelRule, Labels
from agent.edits.specs import Specs
from agent.errors import ConfigError
from agent.hardware.lldp import Neighbour
from agent.ledger import Ledger
from agent.offer.offer import Offer
from agent.offer.units import plain_offer
from agent.report.facts import DriverState
from agent.report.report import Report
from agent.state import Latest
from cni.attachment import Attachments
from deviceplugin.dra.driver import Dra, OnNode
from hack.sim.cluster.apiserver import ApiServerStandIn
from hack.sim.cluster.kinds import SLICE, Target
from proto.dra.v1 import api_pb2, api_pb2_grpc
from tests.agent.ledger.test_claims import claim
from tests.awaiting import until
from tests.deviceplugin.dra.preparing import KubeletStandIn, Others
from tests.deviceplugin.dra.rig import channel
from tests.node import POD, VF, attach, change, new_report, open_books, owner
from tests.node import node as machine
from tests.sim.cluster.dra_documents import resource_slice

OFFERED = (Resource("rdma/vf", "vf", offer="dra"),)


class Node:
    """A node whose configuration changes."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.kubelet_dir = folder / "k"
        (self.kubelet_dir / "plugins").mkdir(parents=True)
        (self.kubelet_dir / "plugins_registry").mkdir()
        self.ledger = ledger
        self.cdi_dir = folder / "cdi"
        self.config = Latest(self.configured())
        self.offer = Latest(Offer())
        self.leaves: Latest[Mapping[str, Neighbour]] = Latest({})
        self.report: Report | None = None
        self.opened = 0
        self.may_open = threading.Event()
        self.may_open.set()
        self.server: ApiServerStandIn | None = None

    def configured(self, *resources: Resource) -> Config:
        return Config(resources, kubelet_dir=self.kubelet_dir, cdi_dir=self.cdi_dir)

    def open_api(self) -> ApiServer:
        self.opened += 1
        assert self.may_open.wait(60)
        if self.server is None:
            raise ConfigError("the account", ["is missing"])
        path = self.kubelet_dir / "kubeconfig"
        path.write_text(self.server.kubeconfig())
        return ApiServer.from_kubeconfig(path)

    def sockets(self) -> list[str]:
        return [path.name for path in (self.kubelet_dir / "plugins_registry").iterdir()]

    @property
    def driver(self) -> DriverState | None:
        return self.report.driver.value if self.report is not None else None

    @asynccontextmanager
    async def running(self, is_due: bool = True) -> AsyncIterator[Dra]:
        self.report = report = new_report()
        nobody = Others()
        kubelet, attachments = KubeletStandIn(nobody), cast(Attachments, nobody)
        specs = Specs(self.ledger, self.cdi_dir)
        on_node = OnNode(
            "node-1", self.config, self.offer, self.ledger, kubelet, attachments, specs, Latest(None), self.leaves
        )
        dra = Dra(on_node, self.open_api, report)
        due = asyncio.Event()
        if is_due:
            due.set()
        task = asyncio.create_task(dra.run(due))
        try:
            yield dra
        finally:
            await dra.close()
            await task


@pytest.fixture
def node(short_folder: Path) -> Iterator[Node]:
    with open_books(short_folder) as ledger:
        yield Node(short_folder, ledger)


@pytest.fixture
def server(node: Node) -> Iterator[ApiServerStandIn]:
    with ApiServerStandIn() as running:
        running.state.add_node("node-1")
        node.server = running
        yield running


@pytest.mark.parametrize(("offered", "is_due"), [((), True), (OFFERED, False)])
async def test_a_node_without_claims_or_before_it_is_due_opens_nothing(
    node: Node, offered: tuple[Resource, ...], is_due: bool
) -> None:
    node.config.set(node.configured(*offered))
    async with node.running(is_due):
        await asyncio.sleep(0.2)
        assert (node.opened, node.sockets()) == (0, [])


async def test_the_driver_comes_and_goes_with_the_configuration(node: Node) -> None:
    async with node.running():
        node.config.set(node.configured(*OFFERED))
        await until(lambda: len(node.sockets()) == 1)
        await until(lambda: node.driver is not None)
        node.config.set(node.configured())
        await until(lambda: node.sockets() == [])
        assert node.opened == 1
        await until(lambda: node.driver is None)


async def test_kubelet_finds_the_driver_while_the_api_server_is_opened_and_a_claim_waits_for_that(
    node: Node, server: ApiServerStandIn
) -> None:
    node.may_open.clear()
    node.config.set(node.configured(*OFFERED))
    async with node.running() as dra:
        await dra.served()
        await until(lambda: len(node.sockets()) == 1)
        await until(lambda: node.opened == 1)
        (socket,) = (node.kubelet_dir / "plugins/nodefabric.io").glob("*.sock")
        async with channel(socket) as to_driver:
            stub: api_pb2_grpc.DRAPluginAsyncStub = api_pb2_grpc.DRAPluginStub(to_driver)
            claim = api_pb2.Claim(namespace="ns", uid="u", name="c")
            call = stub.NodePrepareResources(api_pb2.NodePrepareResourcesRequest(claims=[claim]))
            node.may_open.set()
            assert "does not exist" in (await call).claims["u"].error


async def test_with_the_last_resource_its_slices_go_and_at_the_agents_end_they_stay(
    node: Node, server: ApiServerStandIn
) -> None:
    server.state.write("ResourceSlice", "mine", resource_slice("mine", node="node-1"), "before")
    server.state.write("ResourceSlice", "of-another", resource_slice("of-another", node="node-2"), "before")
    node.config.set(node.configured(*OFFERED))
    async with node.running():
        await until(lambda: len(node.sockets()) == 1)
    assert server.state.get("ResourceSlice", "mine") is not None
    async with node.running():
        await until(lambda: len(node.sockets()) == 1)
        node.config.set(node.configured())
        await until(lambda: server.state.get("ResourceSlice", "mine") is None)
    assert server.state.get("ResourceSlice", "of-another") is not None


async def test_the_driver_stays_until_the_last_claim_is_unprepared(node: Node) -> None:
    node.ledger.prepare_claim(claim())
    async with node.running():
        await until(lambda: len(node.sockets()) == 1)
        node.ledger.remove_claim("uid-c")
        await until(lambda: node.sockets() == [])


def test_an_attachment_tells_interface_and_addresses_of_its_claims_device(tmp_path: Path) -> None:
    with open_books(tmp_path, clock=lambda: 7.0) as ledger:
        made = ledger.prepare_claim(claim())
        row = attach(ledger, VF, owner())
        result = {
            "interfaces": [{"name": "net1"}, {"name": "net1", "mac": "02:00:00:00:00:01", "sandbox": "/ns"}],
            "ips": [{"interface": 1, "address": "192.0.2.1/24"}, {"interface": 0, "address": "192.0.2.9/24"}],
        }
        ledger.finish_attach([row.attachment_id], result)
        (row,) = ledger.attachments()
        leasing = {"network": {"name": "rails", "type": "nodefabric", "ipam": {"type": "host-local"}}}
        (told,) = attached("nodefabric.io", made, replace(row, request=leasing), machine())
        (plain,) = attached("nodefabric.io", made, replace(row, request={"network": None}), machine())

    assert (told["device"], told["pool"]) == (made.devices[0].device_name, "node-1")
    network = {"interfaceName": "net1", "hardwareAddress": "02:00:00:00:00:01", "ips": ["192.0.2.1/24"]}
    assert told["networkData"] == network
    assert (told["data"]["pciAddress"], told["data"]["network"], plain["data"].get("network")) == (VF, "rails", None)
    assert told["conditions"][0]["lastTransitionTime"] == "1970-01-01T00:00:07Z"
    assert POD in made.pods


async def test_how_the_driver_stands_is_told_while_it_runs(node: Node, server: ApiServerStandIn) -> None:
    snapshot = change(machine(), "0000:12:00.1", driver=None)
    node.offer.set(plain_offer(OFFERED, replace(snapshot, generation=1)))
    node.config.set(node.configured(*OFFERED))
    async with node.running():
        await until(lambda: node.driver is not None and node.driver.slices is not None)
        state = node.driver
        assert state is not None
        assert (state.name, state.is_registered) == ("nodefabric.io", False)
        assert "kubelet has not found the driver" in state.problem
        assert state.devices == (("rdma/vf", "NoDriver", 1), ("rdma/vf", "healthy", 15))
    assert node.driver is None


async def test_switches_that_slices_tell_of_stay_after_a_restart_until_others_are_heard(
    node: Node, server: ApiServerStandIn
) -> None:
    listening = Topology(labels=Labels((LabelRule("example.com/leaf", "leaf-switch"),)))

    snapshot = replace(machine(), generation=1)
    node.offer.set(plain_offer(OFFERED, snapshot))
    node.config.set(replace(node.configured(*OFFERED), topology=listening))
    ports = [device.address for device in snapshot.devices if device.vfs]
    node.leaves.set({port: Neighbour("aa:bb", f"Ethernet{i}", "leaf-3") for i, port in enumerate(ports)})
    async with node.running():
        await until(lambda: node.driver is not None and bool(node.driver.slices))
    _, before, _ = server.state.listed(Target(SLICE), {})
    devices = [device for each in before for device in each["spec"]["devices"]]
    assert {device["attributes"]["leaf"]["string"] for device in devices} == {"leaf-3"}

    node.leaves = Latest({})
    async with node.running():
        await until(lambda: node.driver is not None and bool(node.driver.slices))
        _, after, _ = server.state.listed(Target(SLICE), {})
        assert after == before
        assert set(node.leaves.value) == set(ports)
