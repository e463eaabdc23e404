"""Pods with rails of several NICs: what they are answered, and that no two of them have one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agent.config import RailNic, Resource, Select
from agent.ledger import Ledger
from agent.model.device import Snapshot
from hack.sim.pods import Container
from tests.awaiting import until
from tests.deviceplugin.dra.nodes import recorded_node
from tests.deviceplugin.rig import Rig, rig
from tests.node import node, without

PAIR = Resource("rdma/rail", "rail", nic=RailNic("vf", count=2))
P5 = Resource("rdma/rail", "rail", nic=RailNic("hca", Select(vendors=(0x1D0F,)), count=4, shares=1))
ONE = Container("main", (("rdma/rail", 1),))


def nics(books: Ledger) -> list[str]:
    return [nic for hold in books.holds() for nic in hold.devices]


async def offered(r: Rig, snapshot: Snapshot) -> None:
    await until(lambda: r.plugins.allocator.offer.value.snapshot.devices == snapshot.devices)


def turned(snapshot: Snapshot) -> Snapshot:
    """Give the VFs of each adapter to the other one's place, as when cards change their slots."""
    pfs = [device for device in snapshot.devices if device.vfs]
    paths = dict(zip((pf.address for pf in pfs), (pf.path for pf in reversed(pfs)), strict=True))

    def path(address: str | None) -> tuple[str, ...]:
        return paths[address or ""][:-1]

    devices = (
        replace(d, path=(*path(d.physfn or d.address), d.address)) if d.vfs or d.is_vf else d for d in snapshot.devices
    )
    return replace(snapshot, devices=tuple(devices))


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


async def test_whatever_becomes_of_the_hardware_no_second_pod_gets_a_nic_of_the_first(short_folder: Path) -> None:
    async def work(r: Rig) -> None:
        await r.run_pod("a", ONE)
        (mine,) = (hold.devices for hold in r.ledger.holds())
        for snapshot in (
            turned(node(rails=2)),
            without(node(rails=2), "0000:12:00.3"),
            without(turned(node(rails=2)), "0000:22:00.1"),
        ):
            r.publish(snapshot)
            await offered(r, snapshot)
            await r.run_pod("b", ONE)
            held = {hold.key: hold.devices for hold in r.ledger.holds()}
            assert mine in held.values()
            assert len(held) == 2
            assert len(set(nics(r.ledger))) == 4
            await r.kubelet.delete("default/b")
            r.ledger.release([unit for unit, its in held.items() if its != mine])

    async with rig(short_folder, snapshot=node(rails=2), resources=(PAIR,)) as r:
        await work(r)
