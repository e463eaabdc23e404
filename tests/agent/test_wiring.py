"""The parts around one ledger, as the agent puts them together."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from agent.config import Config, Resource
from agent.hardware import recorded
from agent.inventory import Inventory
from agent.kubelet.podresources import PodResources
from agent.ledger import Ledger
from agent.offer.offer import Offer
from agent.process.conditions import NO_POD_NEEDS, Conditions
from agent.state import Latest
from agent.wiring import Parts
from cni.call import Node
from hack.sim.machine import SimulatedMachine
from tests.agent.reconcile.scene import reconcile_once
from tests.awaiting import until
from tests.deviceplugin.rig import new_kubelet
from tests.node import new_report, open_books


class PutTogether(NamedTuple):
    """The parts, and what they were put together with."""

    parts: Parts
    offer: Latest[Offer]
    books: Ledger


@contextlib.asynccontextmanager
async def parts_on(folder: Path, conditions: Conditions, *resources: Resource) -> AsyncIterator[PutTogether]:
    """Put the parts together on a modelled node, with a kubelet and books in the same folder."""
    SimulatedMachine.create(folder / "node", recorded.load(recorded.find("one-nic")), with_links=False)
    config = Config(resources=resources, kubelet_dir=folder, state_dir=folder, run_dir=folder, cdi_dir=folder)
    async with contextlib.AsyncExitStack() as stack:
        kubelet, asked = new_kubelet(folder), PodResources.of_kubelet(folder)
        await kubelet.start()
        stack.push_async_callback(kubelet.close)
        stack.push_async_callback(asked.close)
        host = SimulatedMachine.open(folder / "node")
        stack.callback(host.close)
        inventory = Inventory(host, 60.0)
        await inventory.scan_now()
        books = stack.enter_context(open_books(folder, boot_id=inventory.snapshot.value.boot_id))
        report = new_report(conditions)
        node, offer = Node(host, books, inventory.snapshot, report), Latest(Offer())
        parts = Parts(Latest(config), node, offer, asked, report)
        stack.callback(parts.attachments.close)
        yield PutTogether(parts, offer, books)


@pytest.mark.parametrize("resources", [(), (Resource("rdma/hca", "hca"),)])
async def test_grants_are_settled_once_there_is_an_offer_even_of_nothing(
    short_folder: Path, resources: tuple[Resource, ...]
) -> None:
    """Else kubelet would be asked each second for as long as nothing is configured."""
    async with parts_on(short_folder, Conditions(), *resources) as (parts, offer, _):
        await reconcile_once(parts.reconciler)
        assert not parts.settled.value
        assert not (short_folder / "cni.sock.pods").exists()
        serving = asyncio.create_task(parts.plugins.run())
        try:
            await until(lambda: offer.value.snapshot.generation > 0)
            await reconcile_once(parts.reconciler)
            is_settled = parts.settled.value
            assert (short_folder / "cni.sock.pods").read_text().endswith("\nunknown 0\nend\n")
            await parts.plugins.close()
            await serving
        finally:
            serving.cancel()
        assert is_settled


async def test_a_damaged_ledger_that_was_set_aside_is_told_and_keeps_nobody_from_anything(short_folder: Path) -> None:
    conditions = Conditions()
    async with parts_on(short_folder, conditions) as (parts, _, _):
        await reconcile_once(parts.reconciler)
        assert "damage" not in conditions.found
    (damaged := short_folder / "ledger.db.damaged-1").touch()
    (short_folder / "ledger.db.damaged-1-wal").touch()
    shutil.rmtree(short_folder / "node")
    async with parts_on(short_folder, conditions) as (parts, _, _):
        await reconcile_once(parts.reconciler)
        assert f"is kept as {damaged}: see to the disk" in conditions.found["damage"]
        assert conditions.first(besides=("starting", "kubelet", *NO_POD_NEEDS)) is None
