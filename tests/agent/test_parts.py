"""The parts around one ledger, as the agent puts them together."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from agent.clients.kubelet import PodResources
from agent.config import Config, HealthSettings, Resource
from agent.events import Events
from agent.health import HealthBook
from agent.inventory import Inventory
from agent.metrics import Metrics
from agent.obstacles import Obstacles
from agent.parts import Parts, Surroundings
from agent.sim import recorded
from agent.sim.machine import SimulatedMachine
from tests.agent.books import open_books
from tests.awaiting import until
from tests.deviceplugin.rig import new_kubelet


@pytest.mark.parametrize("resources", [(), (Resource("rdma/hca", "hca"),)])
def test_grants_are_settled_once_there_is_an_offer_even_of_nothing(
    short_folder: Path, resources: tuple[Resource, ...]
) -> None:
    """Else kubelet would be asked each second for as long as nothing is configured."""
    SimulatedMachine.create(short_folder / "node", recorded.load(recorded.find("one-nic")), with_links=False)
    here = short_folder
    config = Config(resources=resources, kubelet_dir=here, state_dir=here, run_dir=here, cdi_dir=here)

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            kubelet, asked = new_kubelet(short_folder), PodResources.of_kubelet(short_folder)
            await kubelet.start()
            stack.push_async_callback(kubelet.close)
            stack.push_async_callback(asked.close)
            host = SimulatedMachine.open(short_folder / "node")
            stack.callback(host.close)
            inventory = Inventory(host, 60.0)
            await inventory.scan_now()
            books = stack.enter_context(open_books(short_folder, boot_id=inventory.snapshot.boot_id))
            health, metrics = HealthBook(HealthSettings()), Metrics(CollectorRegistry())
            around = Surroundings(
                *(lambda: config, host, inventory, asked, health, metrics),
                *(Obstacles(), Events()),
            )
            parts = Parts(around, books)
            stack.callback(parts.attachments.close)
            await parts.reconciler.run_once()
            assert not parts.reconciler.settled
            serving = asyncio.create_task(parts.plugins.run())
            stack.callback(serving.cancel)
            await until(lambda: parts.plugins.allocator.offer.snapshot.generation > 0)
            await parts.reconciler.run_once()
            is_settled = parts.reconciler.settled
            await parts.plugins.close()
            await serving
            assert is_settled

    asyncio.run(scenario())
