"""CDI specs that somebody removes are written again, long before the reconciler looks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.edits.specs import Specs
from agent.errors import Unavailable
from agent.model.allocation import PodRef, Spec
from agent.reconcile.spec_watch import SpecWatch
from agent.report.report import Report
from cni.install.folder import LOOK_SECONDS
from tests.awaiting import until
from tests.node import bound_slot, granted, new_report, open_books, prepare

UNIT, SLOT = "0000:3b:00.3", "slot-rdma:vf-0-1"
EDITS = {"env": ["PCIDEVICE_RDMA_VF=0000:3b:00.1"]}
BOUND = bound_slot(SLOT, "rdma/vf", "vf", "0000:3b:00.1", "worker", "c1", "net1", PodRef("ai", "train-0"), EDITS)


@contextlib.asynccontextmanager
async def keeping(books_in: Path, folder: Path) -> AsyncIterator[tuple[SpecWatch, Report]]:
    """Keep the specs of a unit, a slot and a claim in a folder."""
    with open_books(books_in) as books:
        books.grant(granted("rdma/vf", {UNIT: UNIT}, {UNIT: Spec("vf", EDITS)}))
        books.bind_slots([BOUND])
        prepare(books)
        report = new_report()
        kept = SpecWatch(folder, Specs(books, folder).rewrite, report)
        running = asyncio.create_task(kept.run())
        try:
            yield kept, report
        finally:
            running.cancel()
            await asyncio.wait([running])


@pytest.mark.parametrize(
    "name",
    [f"unit-{UNIT}.json", f"{SLOT}.json", f"{SLOT}.slot", "claim-uid-nics.json", "claim-uid-nics.claim"],
)
async def test_a_cdi_spec_that_is_removed_is_written_again(tmp_path: Path, name: str) -> None:
    spec = tmp_path / f"nodefabric-{name}"
    async with keeping(tmp_path, tmp_path) as (kept, report):
        await until(spec.exists)
        text = spec.read_text()
        for _ in range(2):
            spec.unlink()
            await until(spec.exists)
            assert spec.read_text() == text
        assert kept.problem is None
        await until(lambda: [event.text for event in report.events.listed()] == ["mended"])


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
    running = asyncio.create_task(SpecWatch(tmp_path, specs.rewrite, new_report()).run())
    await until(lambda: specs.attempts > 0)
    await asyncio.sleep(3 * LOOK_SECONDS)
    running.cancel()
    assert specs.attempts == 1


async def test_cdi_specs_that_cannot_be_written_are_told_of_until_they_can(tmp_path: Path) -> None:
    folder = tmp_path / "cdi"
    folder.write_text("in the way")
    async with keeping(tmp_path, folder) as (kept, _):
        await until(lambda: "cannot be written" in (kept.problem or ""))
        folder.unlink()
        await until(lambda: kept.problem is None and list(folder.iterdir()))
