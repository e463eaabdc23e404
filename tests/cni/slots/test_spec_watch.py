"""CDI specs that somebody removes are written again, long before the reconciler looks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from agent.config import Config, HealthSettings
from agent.edits.cdi import SlotSpecs
from agent.edits.claim_specs import ClaimSpecs
from agent.errors import Unavailable
from agent.health_history import HealthHistory
from agent.ledger import Ledger
from agent.model.allocation import Binding, PodRef
from agent.model.device import Snapshot
from agent.process.conditions import Conditions
from agent.reconcile.claims import Claims
from agent.report.events import Events
from agent.report.metrics import Metrics
from agent.report.report import Report
from agent.state import Latest
from cni.install.folder import LOOK_SECONDS
from cni.pod_devices import ClaimReader
from cni.slots.bound import BoundSlots
from cni.slots.spec_watch import SpecWatch
from tests.agent.reconcile.outside import Answers
from tests.awaiting import until
from tests.node import open_books, prepare

SLOT = "slot-rdma:vf-0-1"
EDITS = {"env": ["PCIDEVICE_RDMA_VF=0000:3b:00.1"]}
BINDING = Binding(SLOT, "rdma/vf", "vf", "0000:3b:00.1", "worker", "c1", "net1", PodRef("ai", "train-0"), EDITS)


class Keeping:
    """The specs of one binding in a folder."""

    def __init__(self, specs: SpecWatch, report: Report) -> None:
        self.specs = specs
        self.report = report


def healer_of(books: Ledger, folder: Path) -> Claims:
    """Make what writes the specs of claims."""
    return Claims(books, ClaimSpecs(folder), Latest(Snapshot()), Answers(), Latest[ClaimReader | None](None))


@contextlib.asynccontextmanager
async def keeping(books_in: Path, folder: Path) -> AsyncIterator[Keeping]:
    with open_books(books_in) as books:
        books.bind_slots([BINDING])
        prepare(books)
        report = Report(Metrics(CollectorRegistry()), Conditions(), Events(), HealthHistory(HealthSettings()))
        bound = BoundSlots(Latest(Config(kubelet_dir=books_in)), books, SlotSpecs(folder))
        kept = SpecWatch(folder, (bound, healer_of(books, folder)), report)
        running = asyncio.create_task(kept.run())
        try:
            yield Keeping(kept, report)
        finally:
            running.cancel()
            await asyncio.wait([running])


@pytest.mark.parametrize("name", [SLOT, "claim-uid-nics"])
async def test_a_cdi_spec_that_is_removed_is_written_again(tmp_path: Path, name: str) -> None:
    spec = tmp_path / f"nodefabric-{name}.json"
    async with keeping(tmp_path, tmp_path) as kept:
        await until(spec.exists)
        text = spec.read_text()
        for _ in range(2):
            spec.unlink()
            await until(spec.exists)
            assert spec.read_text() == text
        assert kept.specs.problem is None
        await until(lambda: [event.text for event in kept.report.events.listed()] == ["mended"])


class FullDisk:
    """Specs that get no further than a file of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempts = 0

    def rewrite(self) -> list[str]:
        self.attempts += 1
        (self.folder / "new").touch()
        (self.folder / "new").unlink()
        raise Unavailable("the disk is full")


async def test_specs_that_cannot_be_written_to_their_end_are_not_tried_without_end(tmp_path: Path) -> None:
    specs = FullDisk(tmp_path)
    report = Report(Metrics(CollectorRegistry()), Conditions(), Events(), HealthHistory(HealthSettings()))
    running = asyncio.create_task(SpecWatch(tmp_path, [specs], report).run())
    await until(lambda: specs.attempts > 0)
    await asyncio.sleep(3 * LOOK_SECONDS)
    running.cancel()
    assert specs.attempts == 1


async def test_cdi_specs_that_cannot_be_written_are_told_of_until_they_can(tmp_path: Path) -> None:
    folder = tmp_path / "cdi"
    folder.write_text("in the way")
    async with keeping(tmp_path, folder) as kept:
        await until(lambda: "cannot be written" in (kept.specs.problem or ""))
        folder.unlink()
        await until(lambda: kept.specs.problem is None and list(folder.iterdir()))
