"""Resources that come, go and change while kubelet watches and pods hold devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config import HealthSettings, Resource, Select, parse_pf
from agent.health_history import HealthHistory
from agent.model.device_health import HealthPolicy
from hack.sim.pods import Container
from tests.awaiting import until
from tests.deviceplugin.rig import RESOURCES, Rig, rig, run
from tests.node import change, node, without

HCA, VF, GPU = RESOURCES


def vfs(name: str, *pf: str) -> Resource:
    return Resource(name, "vf", Select(pf=tuple(map(parse_pf, pf))))


def reasons(r: Rig, name: str) -> dict[str, str]:
    return {unit.unit_id: unit.health.reason for unit in r.units[name] if not unit.health.healthy}


async def test_a_new_resource_is_offered_and_the_others_keep_their_streams(short_folder: Path) -> None:
    async with rig(short_folder, resources=(VF,)) as r:
        registered = len(r.calls("Register"))
        await r.reconfigure(VF, HCA)
        await until(lambda: r.allocatable() == {"rdma/hca": 16, "rdma/vf": 16})
        new = r.calls("Register")[registered:]
        assert [call.resource_name for call in new] == ["rdma/hca"]
        assert list(r.plugins.status()) == ["rdma/vf", "rdma/hca"]
        await until(lambda: r.plugins.ready)


async def test_a_resource_that_is_gone_is_no_longer_served_and_leaves_no_socket(short_folder: Path) -> None:
    async with rig(short_folder, resources=(VF, HCA)) as r:
        await r.run_pod("p", Container("main", (("rdma/vf", 1),)))
        await r.reconfigure(HCA)
        await until(lambda: r.allocatable()["rdma/vf"] == 0)
        await until(lambda: len(list(r.plugins.folder.glob("nodefabric-*.sock"))) == 1)
        assert [hold.resource_name for hold in r.ledger.holds()] == ["rdma/vf"]
        assert (await r.run_pod("q", Container("main", (("rdma/vf", 1),))))["phase"] == "Failed"
        await r.reconfigure(HCA, VF)
        await until(lambda: r.allocatable()["rdma/vf"] == 16)


async def test_a_resource_that_comes_back_while_its_server_ends_is_served_again(short_folder: Path) -> None:
    async with rig(short_folder, resources=(VF, HCA)) as r:
        registered = len(r.calls("Register"))
        await r.reconfigure(HCA)
        await r.reconfigure(HCA, VF)
        await until(lambda: [call.resource_name for call in r.calls("Register")[registered:]] == ["rdma/vf"])
        await until(lambda: r.plugins.ready)
        await until(lambda: r.allocatable()["rdma/vf"] == 16)


class Interrupted(HealthHistory):
    """Lets something happen while lists are made."""

    during: Callable[[], None] | None = None

    def policy(self) -> HealthPolicy:
        happens, self.during = self.during, None
        if happens is not None:
            happens()
        return super().policy()


async def test_a_device_that_leaves_while_the_configuration_changes_stays_listed(short_folder: Path) -> None:
    health, loop = Interrupted(HealthSettings(0, 0, 300)), asyncio.get_running_loop()
    async with rig(short_folder, resources=(VF,), health=health) as r:
        gone = r.units["rdma/vf"][0].device
        changing: list[asyncio.Task[None]] = []

        async def begin() -> None:
            changing.append(asyncio.create_task(r.reconfigure(VF, HCA)))
            await asyncio.sleep(0)  # until it has the new resources

        health.during = lambda: asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
        r.publish(without(node(), gone))
        await until(lambda: bool(changing))
        await changing[0]
        await until(lambda: reasons(r, "rdma/vf") == {gone: "DeviceGone"})


def test_an_overlap_that_turns_up_later_is_told_and_the_first_resource_has_the_device(
    short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        named = Resource("a/named", "vf", Select(netdevs=("rail0v0", "late")))
        async with rig(short_folder, snapshot=node(rails=2), resources=(named, vfs("a/rail1", "rail1"))) as r:
            assert not r.plugins.overlaps
            snapshot = r.snapshot.value
            vf = snapshot.by_address["0000:22:00.1"]
            renamed = change(snapshot, vf.address, netdevs=(replace(vf.netdevs[0], name="late"),))
            r.publish(renamed)
            await until(lambda: r.plugins.overlaps)
            (overlap,) = r.plugins.overlaps
            assert (overlap.device, overlap.owner, overlap.loser) == ("0000:22:00.1", "a/named", "a/rail1")
            await until(lambda: r.allocatable() == {"a/named": 2, "a/rail1": 3})

    run(work())
    assert "a/rail1 selects 0000:22:00.1, which a/named has already" in caplog.text


async def test_configurations_in_quick_succession_end_with_the_last(short_folder: Path) -> None:
    async with rig(short_folder, resources=(VF,)) as r:
        await asyncio.gather(
            *(r.reconfigure(*resources) for resources in ((HCA,), (VF, HCA), (GPU,), (VF, GPU), (HCA, GPU)))
        )
        assert set(r.units) == {"rdma/hca", "nvidia.com/gpu"}
        await until(lambda: r.plugins.ready)
        await until(lambda: r.allocatable() == {"rdma/hca": 16, "nvidia.com/gpu": 4, "rdma/vf": 0})


async def test_a_reconfiguration_while_closing_does_not_hang(short_folder: Path) -> None:
    async with rig(short_folder, resources=(VF,)) as r:
        closing = asyncio.create_task(r.plugins.close())
        async with asyncio.timeout(10):
            await r.reconfigure(HCA)
            await closing


async def test_a_resource_that_claims_are_for_is_served_no_more_and_what_pods_have_of_it_is_marked(
    short_folder: Path,
) -> None:
    async with rig(short_folder, snapshot=node(rails=1, vfs=2), resources=(VF, HCA)) as r:
        await r.run_pod("p", Container("main", (("rdma/vf", 1),)))
        [hold] = r.ledger.holds()
        await r.reconfigure(replace(VF, offer="dra"), HCA)
        await until(lambda: r.allocatable() == {"rdma/hca": 4, "rdma/vf": 0})
        assert list(r.plugins.status()) == ["rdma/hca"]
        assert r.units.keys() == {"rdma/vf", "rdma/hca"}
        assert reasons(r, "rdma/vf") == {hold.key: "Held"}
        await r.reconfigure(VF, HCA)
        await until(lambda: r.allocatable()["rdma/vf"] == 2)
