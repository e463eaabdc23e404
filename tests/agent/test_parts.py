"""The parts around one ledger, as the agent puts them together."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from agent.clients.kubelet import PodResources
from agent.config import Config, HealthSettings, Resource
from agent.events import Events
from agent.health import HealthBook
from agent.inventory import Inventory
from agent.metrics import Metrics
from agent.model.allocation import Binding, PodRef
from agent.obstacles import NO_POD_NEEDS, Obstacles
from agent.parts import Parts, Surroundings
from agent.sim import recorded
from agent.sim.machine import SimulatedMachine
from cni.folder_changes import LIMITS, FolderChanges
from tests import descriptors
from tests.agent.books import open_books
from tests.awaiting import until
from tests.deviceplugin.rig import new_kubelet


@contextlib.asynccontextmanager
async def parts_on(
    folder: Path, obstacles: Obstacles, *resources: Resource, cdi_dir: Path | None = None
) -> AsyncIterator[Parts]:
    """Put the parts together on a recorded node, with a kubelet and books in the same folder."""
    SimulatedMachine.create(folder / "node", recorded.load(recorded.find("one-nic")), with_links=False)
    config = Config(resources=resources, kubelet_dir=folder, state_dir=folder, run_dir=folder)
    config = replace(config, cdi_dir=cdi_dir or folder)
    async with contextlib.AsyncExitStack() as stack:
        kubelet, asked = new_kubelet(folder), PodResources.of_kubelet(folder)
        await kubelet.start()
        stack.push_async_callback(kubelet.close)
        stack.push_async_callback(asked.close)
        host = SimulatedMachine.open(folder / "node")
        stack.callback(host.close)
        inventory = Inventory(host, 60.0)
        await inventory.scan_now()
        books = stack.enter_context(open_books(folder, boot_id=inventory.snapshot.boot_id))
        health, metrics = HealthBook(HealthSettings()), Metrics(CollectorRegistry())
        around = Surroundings(
            *(lambda: config, host, inventory, asked, health, metrics),
            *(obstacles, Events()),
        )
        parts = Parts(around, books)
        stack.callback(parts.attachments.close)
        yield parts


@pytest.mark.parametrize("resources", [(), (Resource("rdma/hca", "hca"),)])
def test_grants_are_settled_once_there_is_an_offer_even_of_nothing(
    short_folder: Path, resources: tuple[Resource, ...]
) -> None:
    """Else kubelet would be asked each second for as long as nothing is configured."""

    async def scenario() -> None:
        async with parts_on(short_folder, Obstacles(), *resources) as parts:
            await parts.reconciler.run_once()
            assert not parts.reconciler.settled
            assert not (short_folder / "cni.sock.pods").exists()
            serving = asyncio.create_task(parts.plugins.run())
            try:
                await until(lambda: parts.plugins.allocator.offer.snapshot.generation > 0)
                await parts.reconciler.run_once()
                is_settled = parts.reconciler.settled
                assert (short_folder / "cni.sock.pods").read_text().endswith("\nunknown 0\nend\n")
                await parts.plugins.close()
                await serving
            finally:
                serving.cancel()
            assert is_settled

    asyncio.run(scenario())


def test_a_damaged_ledger_that_was_set_aside_is_told_and_keeps_nobody_from_anything(short_folder: Path) -> None:
    obstacles = Obstacles()

    async def scenario() -> None:
        async with parts_on(short_folder, obstacles) as parts:
            await parts.reconciler.run_once()
            assert "damage" not in obstacles.found
        (damaged := short_folder / "ledger.db.damaged-1").touch()
        (short_folder / "ledger.db.damaged-1-wal").touch()
        shutil.rmtree(short_folder / "node")
        async with parts_on(short_folder, obstacles) as parts:
            await parts.reconciler.run_once()
            assert f"is kept as {damaged}: see to the disk" in obstacles.found["damage"]
            assert obstacles.first(besides=("starting", "kubelet", *NO_POD_NEEDS)) is None

    asyncio.run(scenario())


def test_a_cdi_spec_that_is_removed_is_written_again(short_folder: Path) -> None:
    """Long before the reconciler looks: here it does not run at all."""
    slot, edits = "slot-rdma:vf-0-1", {"env": ["PCIDEVICE_RDMA_VF=0000:3b:00.1"]}
    binding = Binding(slot, "rdma/vf", "vf", "0000:3b:00.1", "worker", "c1", "net1", PodRef("ai", "train-0"), edits)
    spec = short_folder / f"nodefabric-{slot}.json"

    async def scenario() -> None:
        async with parts_on(short_folder, Obstacles()) as parts:
            parts.ledger.bind_slots([binding])
            keeping = asyncio.create_task(parts.keep_specs())
            await until(spec.exists)
            text = spec.read_text()
            for _ in range(2):
                spec.unlink()
                await until(spec.exists)
                assert spec.read_text() == text
            assert parts.cdi_problem is None
            keeping.cancel()
            await asyncio.wait([keeping])

    asyncio.run(scenario())


def test_cdi_specs_that_cannot_be_written_or_watched_are_told_of_until_they_can(short_folder: Path) -> None:
    binding = Binding(
        "slot-rdma:vf-0-1", "rdma/vf", "vf", "0000:3b:00.1", "worker", "c1", "net1", PodRef("ai", "a"), {}
    )
    folder, elsewhere = short_folder / "cdi", short_folder / "elsewhere"

    async def scenario() -> None:
        async with parts_on(short_folder, Obstacles(), cdi_dir=folder) as parts:
            parts.ledger.bind_slots([binding])
            folder.write_text("in the way")
            keeping = asyncio.create_task(parts.keep_specs())
            await until(lambda: "cannot be written" in (parts.cdi_problem or ""))
            folder.unlink()
            await until(lambda: parts.cdi_problem is None and list(folder.iterdir()))
            keeping.cancel()
            await asyncio.wait([keeping])

    asyncio.run(scenario())
    elsewhere.mkdir()
    changes = FolderChanges(elsewhere)
    with descriptors.none_left():
        assert changes.open() is None
    said = [changes.problem]
    assert changes.open() is not None
    said.append(changes.problem)
    assert said == [f"{elsewhere} cannot be watched: Too many open files ({LIMITS})", None]
    changes.close()
