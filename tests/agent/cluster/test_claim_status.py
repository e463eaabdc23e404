"""Claims over real HTTP, against the stand-in for the API server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agent.cluster.apiserver import ApiServer
from agent.cluster.claim_objects import ClaimStatus, entry
from agent.model.allocation import ClaimRef, Hold, NetworkData
from agent.process.backoff import Backoff
from hack.sim.cluster.apiserver import ApiServerStandIn, Fault
from hack.sim.cluster.dra import gates
from hack.sim.cluster.dra.rights import Caller
from tests.awaiting import until
from tests.node import new_report
from tests.sim.cluster.dra_documents import SHARE, allocated

DEVICE = {"driver": "nodefabric.io", "pool": "n", "device": "vf-1"}


def put(server: ApiServerStandIn, name: str = "c", *results: dict[str, Any]) -> ClaimRef:
    """Have an allocated claim at the server."""
    document = allocated(*(results or (DEVICE,)), ref=ClaimRef("", "ns", name))
    stored = server.state.write("ResourceClaim", f"ns/{name}", document, "kube-scheduler")
    return ClaimRef(stored["metadata"]["uid"], "ns", name)


NETWORK = NetworkData("net1", "02:00:00:00:00:01", ("10.1.0.5/24", "fd00::5/64"))
HOLD = Hold("uid-0-vf-1", "rdma/vf", pool="n", device_name="vf-1")
DATA = {"pciAddress": "0000:18:00.2", "rdmaDevice": "mlx5_3", "network": "rails"}
ATTACHED = dict(entry("nodefabric.io", HOLD, 1_767_225_600.0, NETWORK, DATA))
QUICK = Backoff(0.05, 0.1)
QUIET_SECONDS = 0.3


class Writing:
    """A writer, and what it has written."""

    def __init__(
        self,
        server: ApiServerStandIn,
        api: ApiServer,
        *,
        coalesce: float = 0.05,
        retry: Backoff = QUICK,
    ) -> None:
        self.server = server
        report = new_report()
        self.metrics, self.conditions = report.metrics, report.conditions
        self.writer = ClaimStatus(api, report, coalesce, retry)

    @property
    def writes(self) -> int:
        return self.server.state.counts.applies

    def refusals(self, reason: str) -> float:
        labels = {"object": "ResourceClaim", "outcome": reason}
        return self.metrics.registry.get_sample_value("nodefabric_api_writes_total", labels) or 0.0

    def devices(self, name: str = "c") -> list[dict[str, Any]]:
        found = self.server.state.get("ResourceClaim", f"ns/{name}")
        assert found is not None
        devices: list[dict[str, Any]] = found["status"].get("devices", [])
        return devices

    async def quiet(self) -> None:
        """Assert that nothing is written any more."""
        before = self.server.state.counts.applies
        await asyncio.sleep(QUIET_SECONDS)
        assert self.server.state.counts.applies == before

    async def __aenter__(self) -> Writing:
        self.running = asyncio.create_task(self.writer.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


async def test_a_claim_is_told_of_its_device_once(server: ApiServerStandIn, api: ApiServer) -> None:
    ref = put(server)

    writing = Writing(server, api)
    async with writing:
        writing.writer.attached(ref, ATTACHED)
        await until(writing.devices)
        writing.writer.attached(ref, ATTACHED)
        await writing.quiet()
        assert writing.writes == 1
    assert writing.devices() == [
        {
            **DEVICE,
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "Attached",
                    "message": "the device is in the pod as net1",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ],
            "networkData": {
                "interfaceName": "net1",
                "hardwareAddress": "02:00:00:00:00:01",
                "ips": ["10.1.0.5/24", "fd00::5/64"],
            },
            "data": {"pciAddress": "0000:18:00.2", "rdmaDevice": "mlx5_3", "network": "rails"},
        }
    ]


async def test_devices_of_a_claim_that_come_together_are_one_write(server: ApiServerStandIn, api: ApiServer) -> None:
    names = [f"vf-{number}" for number in range(8)]
    ref = put(server, "c", *({**DEVICE, "device": name} for name in names))

    async with Writing(server, api, coalesce=0.5) as writing:
        for name in names:
            writing.writer.attached(ref, {**ATTACHED, "device": name})
            await asyncio.sleep(0.002)
        await until(lambda: len(writing.devices()) == 8)
        await writing.quiet()
        assert writing.writes == 1


def test_what_is_not_there_and_more_addresses_than_a_status_takes_are_left_out() -> None:
    share = entry("nodefabric.io", replace(HOLD, share_id=SHARE), 0.0, NetworkData(), {"rdmaDevice": "mlx5_0", "x": ""})
    assert {key: share.get(key) for key in ("shareID", "networkData", "data")} == {
        "shareID": SHARE,
        "networkData": None,
        "data": {"rdmaDevice": "mlx5_0"},
    }
    many = tuple(f"10.0.0.{number}/24" for number in (1, 1, *range(2, 20)))
    assert replace(NETWORK, addresses=many).document()["ips"] == [f"10.0.0.{n}/24" for n in range(1, 17)]


async def test_a_refusal_of_one_claim_is_said_once_tried_again_and_holds_up_no_other(
    server: ApiServerStandIn, api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    ref, other = put(server, "c"), put(server, "d")
    server.state.caller = Caller()

    async with Writing(server, api) as writing:
        writing.writer.attached(ref, ATTACHED)
        writing.writer.attached(other, ATTACHED)
        await until(lambda: writing.refusals("Refused") >= 5)
        server.state.caller = None
        await until(lambda: writing.devices("c") and writing.devices("d"))
    said = [record for record in caplog.records if record.name == "agent.cluster.claim_objects"]
    assert len(said) == 2


async def test_a_claim_at_which_the_server_fails_holds_up_no_other(server: ApiServerStandIn, api: ApiServer) -> None:
    failing, others = put(server, "c"), [put(server, f"d{number}") for number in range(3)]
    server.state.set_fault(Fault(status=500, path="/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/c"))
    async with Writing(server, api) as writing:
        writing.writer.attached(failing, ATTACHED)
        await until(lambda: writing.refusals("Unavailable") >= 1)
        for other in others:
            writing.writer.attached(other, ATTACHED)
        await until(lambda: all(writing.devices(other.name) for other in others))
        server.state.set_fault(None)
        await until(lambda: writing.devices("c"))


async def test_a_claim_that_is_gone_or_unprepared_is_not_tried_again(server: ApiServerStandIn, api: ApiServer) -> None:
    gone, unprepared = put(server, "gone"), put(server, "c")
    server.state.delete("ResourceClaim", "ns/gone")

    async with Writing(server, api) as writing:
        writing.writer.attached(gone, ATTACHED)
        await until(lambda: writing.refusals("Refused") == 1)
        server.state.set_fault(Fault(status=500))
        writing.writer.attached(unprepared, ATTACHED)
        await until(lambda: writing.refusals("Unavailable") >= 1)
        writing.writer.forget(unprepared.uid)
        server.state.set_fault(None)
        await writing.quiet()
        assert writing.writes == 0
        assert writing.refusals("Refused") == 1


async def test_another_claim_of_the_same_name_is_told_nothing(server: ApiServerStandIn, api: ApiServer) -> None:
    put(server)
    async with Writing(server, api) as writing:
        writing.writer.attached(ClaimRef("of-before", "ns", "c"), ATTACHED)
        await until(lambda: writing.refusals("Refused") >= 1)
        assert writing.devices() == []


async def test_a_cluster_without_device_status_is_asked_once(server: ApiServerStandIn, api: ApiServer) -> None:
    server.state.gates -= {gates.DEVICE_STATUS}
    ref = put(server)

    async with Writing(server, api) as writing:
        writing.writer.attached(ref, ATTACHED)
        await until(lambda: writing.writes == 1)
        await writing.quiet()
        assert writing.devices() == []
