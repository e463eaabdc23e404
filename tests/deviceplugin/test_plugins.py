"""Device plugins and a kubelet stand-in: what is listed, what pods get of it, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from agent.config import RailNic, Resource, Select
from agent.edits.build import GpuFiles
from agent.errors import LedgerError
from agent.ledger import Ledger
from agent.model.allocation import Hold
from agent.model.device import NO_NUMA_NODE, Snapshot
from hack.sim.pods import Container
from proto.deviceplugin.v1beta1 import api_pb2, api_pb2_grpc
from tests.awaiting import until
from tests.deviceplugin.dra.nodes import recorded_node
from tests.deviceplugin.rig import RESOURCES, VF_ONLY, Rig, rig, run, timed
from tests.node import change, gpu_uuid, new_report, node, without

GPU = RESOURCES[2]
THREE = Container("main", (("rdma/hca", 1), ("rdma/vf", 1), ("nvidia.com/gpu", 1)))


async def test_every_resource_is_served_before_it_registers(short_folder: Path) -> None:
    async with rig(short_folder) as r:
        assert r.allocatable() == {"nvidia.com/gpu": 4, "rdma/hca": 16, "rdma/vf": 16}
        for resource in RESOURCES:
            calls = [c.name for c in r.kubelet.registry.calls if c.resource_name == resource.name]
            assert calls == ["Register", "GetDevicePluginOptions", "ListAndWatch"]


async def test_the_numa_node_is_told_and_an_unknown_one_is_not(short_folder: Path) -> None:
    snapshot = change(node(rails=2, vfs=1), "0000:12:00.1", numa_node=NO_NUMA_NODE)
    snapshot = change(snapshot, "0000:12:00.0", numa_node=NO_NUMA_NODE)
    async with rig(short_folder, snapshot=snapshot, resources=VF_ONLY) as r:
        known = r.kubelet.devices.resources["rdma/vf"].devices
        assert not known["0000:12:00.1"].HasField("topology")
        assert [n.ID for n in known["0000:22:00.1"].topology.nodes] == [1]


@pytest.mark.parametrize("seed", range(3))
async def test_a_pod_gets_its_nics_beside_its_gpu_in_whatever_order_kubelet_asks(short_folder: Path, seed: int) -> None:
    async with rig(short_folder, seed=seed) as r:
        for number in range(4):
            pod = await r.run_pod(f"p{number}", THREE)
            assert pod["phase"] == "Running", pod["message"]
            (main,) = pod["containers"]
            (vf,) = main["devices"]["rdma/vf"]
            (hca,) = main["devices"]["rdma/hca"]
            (gpu,) = main["devices"]["nvidia.com/gpu"]
            rail = int(vf[5:7], 16) // 0x10 - 1
            assert gpu == gpu_uuid(rail)
            assert hca.startswith(f"hca-b83fd20300a0{rail:04x}-")
            assert [d["host"] for d in main["device_nodes"]] == [
                "/dev/infiniband/rdma_cm",
                f"/dev/infiniband/uverbs{rail}",
            ]
            assert main["envs"] == {"NVIDIA_VISIBLE_DEVICES": gpu, "PCIDEVICE_RDMA_VF": vf}
        assert len(r.ledger.holds()) == 12


async def test_an_init_containers_units_are_granted_again(short_folder: Path) -> None:
    async with rig(short_folder, resources=VF_ONLY) as r:
        pod = await r.run_pod(
            "p",
            Container("c1", (("rdma/vf", 1),)),
            Container("c2", (("rdma/vf", 2),)),
            init=(Container("i1", (("rdma/vf", 2),)),),
        )
        held = {c["name"]: set(c["devices"]["rdma/vf"]) for c in pod["containers"]}
        assert held["c1"] < held["i1"]
        assert len(held["c2"] & held["i1"]) == 1
        first, second = r.calls("GetPreferredAllocation")
        assert (first.must_include, first.size) == ((), 2)
        assert (set(second.must_include), second.size) == (held["i1"] - held["c1"], 2)
        assert len(r.ledger.holds()) == 3


def test_the_numbers_of_rails_outlive_the_agent_and_an_adapter_that_is_gone_at_its_start(short_folder: Path) -> None:
    whole, gone = node(vfs=1), without(node(vfs=1), "0000:12:00.0", "0000:12:00.1")

    async def work(snapshot: Snapshot) -> dict[str, int]:
        async with rig(short_folder, snapshot=snapshot, resources=VF_ONLY) as r:
            return dict(r.plugins.allocator.offer.value.rail_of)

    numbers = run(work(whole))
    assert numbers["0000:42:00.0"] == 3
    assert run(work(gone)) == numbers


def test_a_cdi_spec_that_comes_after_the_gpus_is_heeded_though_no_hardware_changes(short_folder: Path) -> None:
    files = GpuFiles()

    async def work() -> None:
        nonlocal files
        async with rig(short_folder, resources=(GPU,), gpu_files=lambda: files) as r:
            (before,) = await r.plugins.allocator.allocate(GPU.name, [[gpu_uuid(0)]])
            assert before.cdi_devices == ()
            files = GpuFiles(cdi_names=frozenset({gpu_uuid(0)}))
            await until(lambda: r.plugins.allocator.gpu_files == files)
            (after,) = await r.plugins.allocator.allocate(GPU.name, [[gpu_uuid(0)]])
            assert (after.cdi_devices, after.envs) == ((f"nvidia.com/gpu={gpu_uuid(0)}",), ())

    run(work())


async def test_a_quarantine_shows_at_once_and_so_does_its_end(short_folder: Path) -> None:
    async with rig(short_folder, resources=VF_ONLY) as r:
        await asyncio.to_thread(r.ledger.quarantine, "0000:12:00.1", "vlan could not be reset")
        await until(lambda: r.allocatable()["rdma/vf"] == 15)
        await asyncio.to_thread(r.ledger.end_quarantine, "0000:12:00.1")
        await until(lambda: r.allocatable()["rdma/vf"] == 16)


async def test_a_burst_of_changes_ends_with_the_newest_list(short_folder: Path) -> None:
    async with rig(short_folder, resources=VF_ONLY) as r:
        for round_ in range(60):
            r.publish(node(vfs=round_ % 7))
        r.publish(node(vfs=5))
        await until(lambda: r.allocatable() == {"rdma/vf": 20})


def test_closing_tells_kubelet_and_leaves_neither_sockets_nor_tracebacks(
    short_folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        async with rig(short_folder) as r:
            async with asyncio.timeout(10):
                await r.plugins.close()
            await until(lambda: not any(r.allocatable().values()))
            assert r.kubelet.devices.capacity() == {"nvidia.com/gpu": 4, "rdma/hca": 16, "rdma/vf": 16}
            assert [p.name for p in r.plugins.folder.glob("*.sock")] == ["kubelet.sock"]

    run(work())
    assert "Traceback" not in capfd.readouterr().err
    assert not [r for r in caplog.records if r.exc_info]


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


P5 = Resource("rdma/rail", "rail", nic=RailNic("hca", Select(vendors=(0x1D0F,)), count=4, shares=1))
ONE = Container("main", (("rdma/rail", 1),))


def nics(books: Ledger) -> list[str]:
    return [nic for hold in books.holds() for nic in hold.devices]


async def test_each_of_eight_pods_has_four_of_the_32_adapters_of_a_p5(short_folder: Path) -> None:
    async with rig(short_folder, snapshot=recorded_node("p5-8gpu-32efa"), resources=(P5,)) as r:
        assert r.allocatable() == {"rdma/rail": 8}
        files: list[str] = []
        for n in range(8):
            pod = await r.run_pod(f"p{n}", ONE)
            assert pod["phase"] == "Running"
            nodes = pod["containers"][0]["device_nodes"]
            files += [node["host"] for node in nodes if "uverbs" in node["host"]]
        assert len(set(nics(r.ledger))) == 32
        assert len(files) == len(set(files)) == 32
