"""What cannot be granted fails its own request, with a reason, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from agent.errors import LedgerError
from agent.ledger import Ledger
from agent.model.allocation import Hold
from hack.sim.pods import Container
from proto.deviceplugin.v1beta1 import api_pb2, api_pb2_grpc
from tests.awaiting import until
from tests.deviceplugin.rig import VF_ONLY, Rig, rig, run, timed
from tests.node import new_report


@contextlib.asynccontextmanager
async def plugin_stub(rig: Rig, resource: str):  # type: ignore[no-untyped-def]
    async with grpc.aio.insecure_channel(f"unix:{rig.plugins.folder / rig.socket(resource)}") as channel:
        yield api_pb2_grpc.DevicePluginStub(channel)


@pytest.mark.parametrize(
    ("unit_id", "code", "text"),
    [
        ("0000:99:00.1", grpc.StatusCode.NOT_FOUND, "UnknownUnit: 0000:99:00.1 is not among the 16 units"),
        ("hca-b83fd20300a00001-2", grpc.StatusCode.NOT_FOUND, "UnknownUnit: .* is not among the 16 units that rdma/vf"),
        ("0000:12:00.1", grpc.StatusCode.FAILED_PRECONDITION, "UnitUnhealthy: .* is in quarantine"),
    ],
)
async def test_an_impossible_allocation_is_told_apart(
    short_folder: Path, unit_id: str, code: grpc.StatusCode, text: str
) -> None:
    async with rig(short_folder) as r:
        await asyncio.to_thread(r.ledger.quarantine, "0000:12:00.1", "vlan could not be reset")
        await until(lambda: r.allocatable()["rdma/vf"] == 15)
        async with plugin_stub(r, "rdma/vf") as stub:
            requests = [api_pb2.ContainerAllocateRequest(devices_ids=[each]) for each in ("0000:22:00.1", unit_id)]
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Allocate(api_pb2.AllocateRequest(container_requests=requests))
        assert r.ledger.holds() == ()
        assert failure.value.code() is code
        assert re.match(text, failure.value.details() or "")


class Broken(Ledger):
    """Books in which no grant can be written."""

    error: Exception

    def grant(self, holds: Iterable[Hold]) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            LedgerError("ledger.db: database or disk is full: free space"),
            "code = UNAVAILABLE desc = LedgerError: .*full",
        ),
        (ZeroDivisionError("surprise"), "code = INTERNAL desc = ZeroDivisionError: surprise"),
    ],
)
async def test_a_failing_ledger_fails_the_request_and_nothing_else(
    short_folder: Path, error: Exception, text: str
) -> None:
    book = Broken.open(short_folder / "broken.db", "boot")
    book.error = error
    with contextlib.closing(book):
        async with rig(short_folder, resources=VF_ONLY, book=book) as r:
            for name in ("one", "two"):
                pod = await r.run_pod(name, Container("c", (("rdma/vf", 1),)))
                assert (pod["phase"], pod["reason"]) == ("Failed", "UnexpectedAdmissionError")
                assert re.search(text, pod["message"])
            assert r.plugins.ready
            assert r.allocatable() == {"rdma/vf": 16}


def test_each_call_is_timed_with_its_resource_and_error(short_folder: Path) -> None:
    metrics = new_report().metrics

    async def work() -> None:
        async with rig(short_folder, resources=VF_ONLY, observe=metrics.observe) as r:
            await r.run_pod("p", Container("c", (("rdma/vf", 1),)))
            async with plugin_stub(r, "rdma/vf") as stub:
                request = api_pb2.ContainerAllocateRequest(devices_ids=["nonsense"])
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.Allocate(api_pb2.AllocateRequest(container_requests=[request]))

    run(work())
    assert timed(metrics) == {
        ("GetPreferredAllocation", "rdma/vf", "ok"): 1,
        ("Allocate", "rdma/vf", "ok"): 1,
        ("Allocate", "rdma/vf", "UnknownUnit"): 1,
    }
