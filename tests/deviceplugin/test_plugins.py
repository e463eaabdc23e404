from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import grpc.aio
import pytest

from agent.config import Config, Resource
from agent.errors import LedgerError
from agent.ledger import Ledger
from agent.model.device import NO_NUMA_NODE
from agent.sim.pods import Container
from deviceplugin.plugins import DevicePlugins
from proto.deviceplugin.v1beta1 import api_pb2, api_pb2_grpc
from tests.deviceplugin.machines import StillInventory, change, gpu_uuid, netdev, node, without
from tests.deviceplugin.rig import QUICK, RESOURCES, Rig, new_kubelet, rig, run, until

THREE = Container("main", (("rdma/hca", 1), ("rdma/vf", 1), ("nvidia.com/gpu", 1)))
VF_ONLY = (Resource("rdma/vf", "vf"),)


@contextlib.asynccontextmanager
async def plugin_stub(rig: Rig, resource: str):  # type: ignore[no-untyped-def]
    name = next(s.registration.socket for s in rig.plugins.status() if s.resource_name == resource)
    async with grpc.aio.insecure_channel(f"unix:{rig.plugins.folder / name}") as channel:
        yield api_pb2_grpc.DevicePluginStub(channel)


def test_every_resource_is_served_before_it_registers(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path) as r:
            assert r.allocatable() == {"nvidia.com/gpu": 4, "rdma/hca": 16, "rdma/vf": 16}
            for resource in RESOURCES:
                calls = [c.name for c in r.kubelet.registry.calls if c.resource_name == resource.name]
                assert calls == ["Register", "GetDevicePluginOptions", "ListAndWatch"]

    run(work())


def test_a_resource_without_devices_is_registered_with_an_empty_list(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path, snapshot=node(vfs=0), resources=VF_ONLY) as r:
            assert r.plugins.ready
            assert r.allocatable() == {"rdma/vf": 0}

    run(work())


def test_the_numa_node_is_told_and_an_unknown_one_is_not(short_path: Path) -> None:
    async def work() -> None:
        snapshot = change(node(rails=2, vfs=1), "0000:12:00.1", numa_node=NO_NUMA_NODE)
        snapshot = change(snapshot, "0000:12:00.0", numa_node=NO_NUMA_NODE)
        async with rig(short_path, snapshot=snapshot, resources=VF_ONLY) as r:
            known = r.kubelet.devices.resources["rdma/vf"].devices
            assert not known["0000:12:00.1"].HasField("topology")
            assert [n.ID for n in known["0000:22:00.1"].topology.nodes] == [1]

    run(work())


@pytest.mark.parametrize("seed", range(6))
def test_a_pod_gets_its_nics_beside_its_gpu_in_whatever_order_kubelet_asks(short_path: Path, seed: int) -> None:
    async def work() -> None:
        async with rig(short_path, seed=seed) as r:
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
            assert len(r.ledger.grants()) == 12

    run(work())


def test_kubelet_asks_for_the_resources_in_random_order(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path, seed=3) as r:
            for number in range(4):
                await r.run_pod(f"p{number}", THREE)
            order = [c.resource_name for c in r.calls("Allocate")]
            assert len({tuple(order[i : i + 3]) for i in range(0, 12, 3)}) > 1

    run(work())


def test_an_init_containers_units_are_granted_again(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path, resources=VF_ONLY) as r:
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
            assert len(r.ledger.grants()) == 3

    run(work())


def test_the_lists_follow_the_hardware(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path) as r:
            await r.inventory.publish(node(vfs=0))
            await until(lambda: r.kubelet.devices.capacity()["rdma/vf"] == 0)
            await r.inventory.publish(node(vfs=7))
            await until(lambda: r.allocatable()["rdma/vf"] == 28)
            await r.inventory.publish(without(node(vfs=7), "0000:12:00.1"))
            await until(lambda: r.allocatable()["rdma/vf"] == 27)

    run(work())


def test_a_lost_link_makes_units_unhealthy_and_its_return_healthy(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path) as r:
            down = change(node(), "0000:12:00.0", netdevs=(netdev("rail0", carrier=False),), rdma_devices=())
            await r.inventory.publish(down)
            await until(lambda: r.allocatable()["rdma/vf"] == 12)
            assert r.kubelet.devices.capacity()["rdma/vf"] == 16
            vf = next(s for s in r.plugins.status() if s.resource_name == "rdma/vf")
            assert (vf.units, vf.unhealthy) == (16, (("LinkDown", 4),))
            await r.inventory.publish(node())
            await until(lambda: r.allocatable()["rdma/vf"] == 16)

    run(work())


def test_a_quarantine_shows_at_once_and_so_does_its_end(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path) as r:
            await asyncio.to_thread(r.ledger.quarantine, "0000:12:00.1", "vlan could not be reset")
            await until(lambda: r.allocatable()["rdma/vf"] == 15)
            await asyncio.to_thread(r.ledger.end_quarantine, "0000:12:00.1")
            await until(lambda: r.allocatable()["rdma/vf"] == 16)

    run(work())


def test_plugins_register_again_after_kubelet_has_restarted(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path) as r:
            before = {s.registration.socket for s in r.plugins.status()}
            await r.kubelet.restart()
            assert r.allocatable() == {"nvidia.com/gpu": 0, "rdma/hca": 0, "rdma/vf": 0}
            await until(lambda: r.allocatable() == {"nvidia.com/gpu": 4, "rdma/hca": 16, "rdma/vf": 16})
            await until(lambda: r.plugins.ready)
            after = {s.registration.socket for s in r.plugins.status()}
            assert not before & after
            assert {p.name for p in r.plugins.folder.glob("*.sock")} == {*after, "kubelet.sock"}

    run(work())


def test_running_pods_keep_their_units_over_a_kubelet_restart(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path, resources=VF_ONLY) as r:
            first = await r.run_pod("first", Container("c", (("rdma/vf", 8),)))
            await r.kubelet.restart()
            await until(lambda: r.allocatable() == {"rdma/vf": 16})
            second = await r.run_pod("second", Container("c", (("rdma/vf", 8),)))
            both = [*first["containers"][0]["devices"]["rdma/vf"], *second["containers"][0]["devices"]["rdma/vf"]]
            assert len(set(both)) == 16

    run(work())


def test_a_kubelet_that_is_not_there_is_waited_for_and_logged_once(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        (short_path / "device-plugins").mkdir()
        ledger = Ledger.open(short_path / "ledger.db", "boot")
        config = Config(resources=VF_ONLY, kubelet_dir=short_path)
        plugins = DevicePlugins(config, StillInventory(node()), ledger, pace=QUICK)
        running = asyncio.create_task(plugins.run())
        await asyncio.sleep(0.3)
        assert not plugins.ready
        (status,) = plugins.status()
        assert status.registration.problem.endswith("kubelet.sock is missing: waiting for kubelet")
        kubelet = new_kubelet(short_path)
        await kubelet.start()
        await until(lambda: plugins.ready)
        await plugins.close()
        await running
        await kubelet.close()
        ledger.close()

    with caplog.at_level(logging.INFO):
        run(work())
    assert sum("is missing" in r.message for r in caplog.records) == 1


def test_a_missing_kubelet_folder_is_waited_for_and_named(short_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        ledger = Ledger.open(short_path / "ledger.db", "boot")
        config = Config(resources=VF_ONLY, kubelet_dir=short_path / "kubelet")
        plugins = DevicePlugins(config, StillInventory(node()), ledger, pace=QUICK)
        running = asyncio.create_task(plugins.run())
        await asyncio.sleep(0.3)
        assert not running.done()
        kubelet = new_kubelet(short_path / "kubelet")
        await kubelet.start()
        await until(lambda: plugins.ready)
        await plugins.close()
        await running
        await kubelet.close()
        ledger.close()

    run(work())
    assert sum("device-plugins is missing: waiting for kubelet" in r.message for r in caplog.records) == 1


def test_a_kubelet_folder_with_too_long_a_name_is_named_with_the_remedy(short_path: Path) -> None:
    async def work() -> None:
        folder = short_path / ("x" * 80)
        (folder / "device-plugins").mkdir(parents=True)
        ledger = Ledger.open(short_path / "ledger.db", "boot")
        plugins = DevicePlugins(Config(resources=VF_ONLY, kubelet_dir=folder), StillInventory(node()), ledger)
        running = asyncio.create_task(plugins.run())
        await until(lambda: "set a shorter kubeletDir" in plugins.status()[0].registration.problem)
        await plugins.close()
        await running
        ledger.close()

    run(work())


def test_a_stale_kubelet_socket_is_retried_until_kubelet_is_back(short_path: Path) -> None:
    async def work() -> None:
        folder = short_path / "device-plugins"
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / "kubelet.sock"))
        ledger = Ledger.open(short_path / "ledger.db", "boot")
        config = Config(resources=VF_ONLY, kubelet_dir=short_path)
        plugins = DevicePlugins(config, StillInventory(node()), ledger, pace=QUICK)
        running = asyncio.create_task(plugins.run())
        await until(lambda: "did not register" in plugins.status()[0].registration.problem)
        kubelet = new_kubelet(short_path)
        await kubelet.start()
        await until(lambda: plugins.ready)
        await plugins.close()
        await running
        await kubelet.close()
        ledger.close()

    run(work())


def test_a_removed_socket_file_is_replaced_and_registered_again(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path) as r:
            old = next(s.registration for s in r.plugins.status() if s.resource_name == "rdma/vf")
            (r.plugins.folder / old.socket).unlink()
            await until(lambda: len(r.calls("Register")) == 4)
            # Ready is told by the open stream; kubelet reads its first list a moment later.
            await until(lambda: r.allocatable() == {"nvidia.com/gpu": 4, "rdma/hca": 16, "rdma/vf": 16})
            new = next(s.registration for s in r.plugins.status() if s.resource_name == "rdma/vf")
            assert new.socket != old.socket
            assert (r.plugins.folder / new.socket).exists()

    run(work())


def test_the_old_stream_has_ended_before_the_next_registration(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path, resources=VF_ONLY) as r:
            for round_ in range(1, 4):
                (r.plugins.folder / r.plugins.status()[0].registration.socket).unlink()
                await until(lambda n=round_: len(r.calls("ListAndWatch")) == n + 1)  # type: ignore[misc]
                await until(lambda: r.plugins.ready)
            names = [c.name for c in r.calls("Register", "stream ended")]
            assert names == ["Register"] + ["stream ended", "Register"] * 3
            await until(lambda: r.allocatable() == {"rdma/vf": 16})

    run(work())


def test_a_stream_that_kubelet_ends_is_registered_again(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path, resources=VF_ONLY) as r:
            client = r.kubelet.registry.client("rdma/vf")
            assert client is not None
            await client.close()
            await until(lambda: len(r.calls("ListAndWatch")) == 2)
            await until(lambda: r.allocatable() == {"rdma/vf": 16})

    run(work())


def test_sockets_that_a_killed_process_left_are_swept_and_live_ones_are_not(short_path: Path) -> None:
    async def work() -> None:
        folder = short_path / "device-plugins"
        folder.mkdir()
        dead, foreign = folder / "nodefabric-rdma-vf-00000000.sock", folder / "other.sock"
        for path in (dead, foreign):
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(path))
        with socket.socket(socket.AF_UNIX) as live:
            live.bind(str(folder / "nodefabric-rdma-vf-11111111.sock"))
            live.listen()
            ledger = Ledger.open(short_path / "ledger.db", "boot")
            plugins = DevicePlugins(
                Config(resources=VF_ONLY, kubelet_dir=short_path), StillInventory(node()), ledger, pace=QUICK
            )
            running = asyncio.create_task(plugins.run())
            await until(lambda: plugins.status()[0].registration.socket)
            own = plugins.status()[0].registration.socket
            assert {p.name for p in folder.iterdir()} == {"nodefabric-rdma-vf-11111111.sock", "other.sock", own}
            await plugins.close()
            await running
            assert {p.name for p in folder.iterdir()} == {"nodefabric-rdma-vf-11111111.sock", "other.sock"}
            ledger.close()

    run(work())


@pytest.mark.parametrize(
    ("unit_id", "code", "text"),
    [
        ("0000:99:00.1", grpc.StatusCode.NOT_FOUND, "UnknownUnit: 0000:99:00.1 is not among the 16 units"),
        ("0000:12:00.1", grpc.StatusCode.FAILED_PRECONDITION, "UnitUnhealthy: .* is withheld"),
    ],
)
def test_an_impossible_allocation_is_told_apart(
    short_path: Path, unit_id: str, code: grpc.StatusCode, text: str
) -> None:
    async def work() -> None:
        async with rig(short_path) as r:
            await asyncio.to_thread(r.ledger.quarantine, "0000:12:00.1", "vlan could not be reset")
            await until(lambda: r.allocatable()["rdma/vf"] == 15)
            async with plugin_stub(r, "rdma/vf") as stub:
                request = api_pb2.ContainerAllocateRequest(devices_ids=[unit_id])
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await stub.Allocate(api_pb2.AllocateRequest(container_requests=[request]))
            assert failure.value.code() is code
            assert re.match(text, failure.value.details() or "")

    run(work())


class Broken:
    """Books in which nothing can be written."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def grant(self, resource_name: str, units: Mapping[str, str]) -> None:
        raise self.error

    def quarantines(self) -> tuple[()]:
        return ()

    def attachments(self) -> tuple[()]:
        return ()

    def grants(self) -> tuple[()]:
        return ()

    def bindings(self) -> tuple[()]:
        return ()

    def pod_of(self, unit_id: str) -> None:
        return None

    def subscribe(self, listener: object) -> None:
        return


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
def test_a_failing_ledger_fails_the_request_and_nothing_else(short_path: Path, error: Exception, text: str) -> None:
    async def work() -> None:
        async with rig(short_path, resources=VF_ONLY, book=Broken(error)) as r:
            for name in ("one", "two"):
                pod = await r.run_pod(name, Container("c", (("rdma/vf", 1),)))
                assert (pod["phase"], pod["reason"]) == ("Failed", "UnexpectedAdmissionError")
                assert re.search(text, pod["message"])
            assert r.plugins.ready
            assert r.allocatable() == {"rdma/vf": 16}

    run(work())


@pytest.fixture
def tiny_disk(tmp_path: Path, own_network: None) -> Iterator[Path]:
    """A folder on a disk of a few pages."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "nodefabric-test", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_under_the_ledger_refuses_grants_and_heals(short_path: Path, tiny_disk: Path) -> None:
    async def work() -> None:
        ledger = Ledger.open(tiny_disk / "ledger.db", "boot")
        with contextlib.closing(ledger):
            async with rig(short_path, resources=VF_ONLY, book=ledger) as r:
                filler = tiny_disk / "filler"
                with contextlib.suppress(OSError), filler.open("wb") as file:
                    while True:
                        file.write(b"x" * 4096)
                        file.flush()
                pods = [await r.run_pod(f"p{n}", Container("c", (("rdma/vf", 1),))) for n in range(16)]
                failed = [p for p in pods if p["phase"] == "Failed"]
                assert failed
                assert "code = UNAVAILABLE desc = LedgerError" in failed[0]["message"]
                assert r.plugins.ready
                filler.unlink()
                healed = await r.run_pod("healed", Container("c", (("rdma/vf", 1),)))
                assert healed["phase"] == "Running"

    run(work())


def test_a_thousand_units_are_listed_and_preferred(short_path: Path) -> None:
    async def work() -> None:
        resources = (Resource("rdma/hca", "hca", shares=250),)
        async with rig(short_path, resources=resources) as r:
            assert r.allocatable() == {"rdma/hca": 1000}
            pod = await r.run_pod("p", Container("c", (("rdma/hca", 8),)))
            assert len(pod["containers"][0]["device_nodes"]) == 5

    run(work())


def test_a_burst_of_changes_ends_with_the_newest_list(short_path: Path) -> None:
    async def work() -> None:
        async with rig(short_path, resources=VF_ONLY) as r:
            for round_ in range(60):
                await r.inventory.publish(node(vfs=round_ % 7))
            await r.inventory.publish(node(vfs=5))
            await until(lambda: r.allocatable() == {"rdma/vf": 20})

    run(work())


def test_closing_takes_less_than_a_second_and_leaves_no_traceback(
    short_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work() -> float:
        async with rig(short_path) as r:
            began = time.monotonic()
            await r.plugins.close()
            spent = time.monotonic() - began
            await until(lambda: not any(r.allocatable().values()))
            assert r.kubelet.devices.capacity() == {"nvidia.com/gpu": 4, "rdma/hca": 16, "rdma/vf": 16}
            assert [p.name for p in r.plugins.folder.glob("*.sock")] == ["kubelet.sock"]
            return spent

    assert run(work()) < 1
    assert "Traceback" not in capfd.readouterr().err
    assert not [r for r in caplog.records if r.exc_info]


def test_each_call_is_observed_with_its_error(short_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    lock = threading.Lock()

    @contextlib.contextmanager
    def observe(operation: str) -> Iterator[None]:
        outcome = "ok"
        try:
            yield
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            with lock:
                seen.append((operation, outcome))

    async def work() -> None:
        async with rig(short_path, resources=VF_ONLY, observe=observe) as r:
            await r.run_pod("p", Container("c", (("rdma/vf", 1),)))
            async with plugin_stub(r, "rdma/vf") as stub:
                request = api_pb2.ContainerAllocateRequest(devices_ids=["nonsense"])
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.Allocate(api_pb2.AllocateRequest(container_requests=[request]))

    run(work())
    assert seen == [("GetPreferredAllocation", "ok"), ("Allocate", "ok"), ("Allocate", "UnknownUnit")]
