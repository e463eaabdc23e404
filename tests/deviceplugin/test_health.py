"""Health from the hardware to kubelet's list, over real sockets, with what time alone brings about."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

from agent.config import HealthSettings
from agent.health_history import HealthHistory
from agent.model.device import Snapshot
from agent.model.device_health import GpuEvent
from agent.model.health import Reason
from hack.sim.pods import Container
from tests.awaiting import until
from tests.deviceplugin.rig import VF_ONLY, Rig, rig
from tests.node import change, gpu_uuid, netdev, node, without

PF, VF = "0000:12:00.0", "0000:12:00.1"
NEVER = 3600.0


def link(up: bool) -> Snapshot:
    """Make a node whose first PF has a link, or has none."""
    return change(node(), PF, netdevs=(netdev("rail0", carrier=up),), rdma_devices=())


def reasons(r: Rig, resource: str = "rdma/vf") -> dict[str, int]:
    return Counter(unit.health.reason for unit in r.units[resource] if not unit.health.healthy)


def book(down: float = NEVER, up: float = NEVER, gone: float = NEVER) -> HealthHistory:
    return HealthHistory(HealthSettings(down_seconds=down, up_seconds=up, gone_seconds=gone))


async def test_a_link_that_stays_down_is_told_without_another_event(short_folder: Path) -> None:
    async with rig(short_folder, snapshot=link(True), health=book(down=0.3, up=0.3)) as r:
        r.publish(link(False))
        await until(lambda: r.allocatable()["rdma/vf"] == 12)
        assert reasons(r) == {"LinkDown": 4}
        r.publish(link(True))
        await until(lambda: r.allocatable()["rdma/vf"] == 16)


async def test_a_flap_is_not_told_though_other_things_are(short_folder: Path) -> None:
    async with rig(short_folder, snapshot=link(True), health=book()) as r:
        r.publish(link(False))
        r.publish(change(link(False), "0000:22:00.1", driver=None))
        await until(lambda: r.allocatable()["rdma/vf"] == 15)
        assert reasons(r) == {"NoDriver": 1}


async def test_vfs_that_vanish_stay_in_the_list_for_a_while_and_come_back(short_folder: Path) -> None:
    health = book()
    async with rig(short_folder, health=health) as r:
        r.publish(node(vfs=2))
        await until(lambda: r.allocatable()["rdma/vf"] == 8)
        assert r.kubelet.devices.capacity()["rdma/vf"] == 16
        assert reasons(r) == {"DeviceGone": 8}
        health.settings.set(replace(health.settings.value, gone_seconds=0.5))
        await until(lambda: r.kubelet.devices.capacity()["rdma/vf"] == 8)  # time alone
        r.publish(node())
        await until(lambda: r.allocatable()["rdma/vf"] == 16)
        assert reasons(r) == {}


async def test_a_device_that_vanished_from_under_a_pod_is_listed_until_the_pod_has_ended(short_folder: Path) -> None:
    async with rig(short_folder, health=book(gone=0.1)) as r:
        await r.run_pod("a", Container("c", (("rdma/vf", 1),)))
        (hold,) = r.ledger.holds()
        r.publish(without(node(), hold.device))
        await until(lambda: reasons(r) == {"DeviceGone": 1})
        await asyncio.sleep(0.3)
        r.publish(without(node(), hold.device, "0000:22:00.1"))
        await until(lambda: reasons(r) == {"DeviceGone": 1} and len(r.units["rdma/vf"]) == 15)
        await asyncio.to_thread(r.ledger.release, (hold.key,))
        await until(lambda: reasons(r) == {} and r.kubelet.devices.capacity()["rdma/vf"] == 14)


async def test_an_error_of_a_gpu_is_told_though_nothing_else_changed(short_folder: Path) -> None:
    health = HealthHistory(HealthSettings(xid_quiet_seconds=NEVER))
    async with rig(short_folder, health=health) as r:
        loop = asyncio.get_running_loop()
        event = GpuEvent(74, asyncio.get_running_loop().time(), gpu_uuid(1))
        await loop.run_in_executor(None, health.gpu_event, event)
        await until(lambda: r.allocatable()["nvidia.com/gpu"] == 3)
        assert reasons(r, "nvidia.com/gpu") == {"XidTransient": 1}
        health.settings.set(HealthSettings(xid_quiet_seconds=0.5))
        await until(lambda: r.allocatable()["nvidia.com/gpu"] == 4)  # time alone


async def test_books_that_cannot_be_written_keep_kubelet_from_sending_pods_here(short_folder: Path) -> None:
    health = book()
    async with rig(short_folder, resources=VF_ONLY, health=health) as r:
        health.unavailable.set(Reason.BOOKS_UNWRITABLE)
        await until(lambda: set(r.allocatable().values()) == {0})
        assert reasons(r) == {"BooksUnwritable": 16}
        assert r.kubelet.devices.capacity()["rdma/vf"] == 16
        health.unavailable.set(None)
        await until(lambda: r.allocatable()["rdma/vf"] == 16)
