"""Health on a real kernel: cables, drivers, VFs and soft RoCE, seen in the list that kubelet gets, with its reason.

The inventory, the device plugins and a kubelet stand-in run in this process, on a loop of their own.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.config import Config, HealthSettings, Resource
from agent.hardware.machine import Machine
from agent.health_history import HealthHistory
from agent.inventory import Inventory
from agent.ledger import Ledger
from agent.state import Latest
from deviceplugin.plugins import Ground
from hack.sim.kubelet import Kubelet
from tests.deviceplugin.rig import plugins_on
from tests.vm.adapters import PCI_DEVICES, MakeVfs, Pf, cable, wait_until

RESOURCES = (Resource("rdma/vf", "vf"), Resource("rdma/hca", "hca", shares=2))
SETTINGS = HealthSettings(down_seconds=0.5, up_seconds=0.5, gone_seconds=3600)
VFS = 3


class Node:
    """What runs, on a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machine = Machine.open()
        self.inventory = Inventory(self.machine, 3600)  # so that nothing is found by the timer
        self.ledger = Ledger.open(folder / "ledger.db", "boot")
        config = Config(resources=RESOURCES, kubelet_dir=folder, cdi_dir=folder / "cdi")
        ground = Ground(self.inventory.snapshot, self.ledger, HealthHistory(SETTINGS))
        self.plugins = plugins_on(Latest(config), ground)
        self.kubelet: Kubelet | None = None
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def start(self) -> None:
        self._thread.start()
        wait_until("all resources to be registered", lambda: self.kubelet is not None and self.plugins.ready, 60)

    def close(self) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self.ledger.close()
        self.machine.close()

    def healthy(self, resource: str = "rdma/vf") -> int:
        """Count what kubelet may hand out."""
        assert self.kubelet is not None
        return self.kubelet.devices.allocatable().get(resource, 0)

    def reasons(self, resource: str = "rdma/vf") -> dict[str, int]:
        units = self.plugins.allocator.offer.value.offered[resource]
        return Counter(unit.health.reason for unit in units if not unit.health.healthy)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        kubelet = Kubelet(self.folder, netns_dir=self.folder / "netns")
        await kubelet.start()
        await self.inventory.scan_now()
        tasks = [asyncio.create_task(self.inventory.run()), asyncio.create_task(self.plugins.run())]
        self.kubelet = kubelet
        await self._stop.wait()
        await self.plugins.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await kubelet.close()


@pytest.fixture(scope="module")
def node(pfs: tuple[Pf, ...], vfs: MakeVfs) -> Iterator[Node]:
    for pf in pfs:
        vfs(pf, 0)
    vfs(pfs[0], VFS)
    with tempfile.TemporaryDirectory(prefix="nf-") as folder:
        running = Node(Path(folder))
        running.start()
        wait_until("the VFs", lambda: running.healthy() == VFS)
        yield running
        running.close()


@pytest.fixture
def plugged(pfs: tuple[Pf, ...]) -> Iterator[None]:
    """Cables that are plugged in again after the test."""
    yield
    for number in range(len(pfs)):
        cable(number, "on")


def test_vfs_follow_the_cable_of_their_pf(node: Node, plugged: None) -> None:
    cable(0, "off")
    wait_until("the lost link", lambda: node.healthy() == 0 and node.reasons() == {"LinkDown": VFS})
    cable(0, "on")
    wait_until("the link", lambda: node.healthy() == VFS and node.reasons() == {})


def test_a_vf_without_driver_says_so_and_nothing_else_is_read(node: Node, pfs: tuple[Pf, ...]) -> None:
    vf, scans = pfs[0].vfs()[1], node.inventory.scans
    driver = (PCI_DEVICES / vf / "driver").resolve()
    (driver / "unbind").write_text(vf)
    wait_until("the missing driver", lambda: node.healthy() == VFS - 1 and node.reasons() == {"NoDriver": 1})
    (driver / "bind").write_text(vf)
    wait_until("the driver", lambda: node.healthy() == VFS and node.reasons() == {})
    assert node.inventory.scans == scans


def test_vfs_that_were_removed_say_so_until_they_are_back(node: Node, pfs: tuple[Pf, ...]) -> None:
    scans = node.inventory.scans
    pfs[0].set_vfs(0)
    wait_until("the missing VFs", lambda: node.healthy() == 0 and node.reasons() == {"DeviceGone": VFS})
    pfs[0].set_vfs(VFS)
    wait_until("the VFs", lambda: node.healthy() == VFS and node.reasons() == {})
    assert node.inventory.scans == scans


def test_shares_follow_the_port_of_soft_roce(
    node: Node, pfs: tuple[Pf, ...], rxe: Callable[[str], str], plugged: None
) -> None:
    rxe(pfs[1].netdev)
    wait_until("the HCA", lambda: node.healthy("rdma/hca") == 2)
    cable(1, "off")
    wait_until("the lost port", lambda: node.healthy("rdma/hca") == 0 and node.reasons("rdma/hca") == {"PortDown": 2})
    cable(1, "on")
    wait_until("the port", lambda: node.healthy("rdma/hca") == 2)


def test_an_hca_whose_rdma_device_went_says_so(node: Node) -> None:
    wait_until("the missing HCA", lambda: node.reasons("rdma/hca") == {"NoRdmaDevice": 2})


def test_what_events_told_is_what_a_scan_of_everything_finds(node: Node) -> None:
    wait_until("the end of all events", lambda: node.machine.scan().devices == node.inventory.snapshot.value.devices)
