"""Full scans and small looks: on events and on the timer, and what is said of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config import Placement
from agent.config.sections import GpuNames
from agent.errors import DriverUnavailable, HardwareError
from agent.inventory import Inventory
from agent.model.change import EVERYTHING, NOTHING, Change, of_function
from agent.model.cloud_topology import Places
from agent.model.device import Problem, Snapshot
from tests.agent.scanned import FakeHost, FakeWatch, inventory_of, learns
from tests.awaiting import until

PORT = of_function("0000:3b:00.1")
OTHER = Snapshot(boot_id="b")


@asynccontextmanager
async def running(inventory: Inventory, generation: int = 1) -> AsyncIterator[None]:
    """Follow the hardware, from a snapshot of this generation on."""
    task = asyncio.create_task(inventory.run())
    try:
        await until(lambda: inventory.snapshot.value.generation >= generation)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def scan_that_hangs(host: FakeHost) -> None:
    """Have a scan read boot ID a, and end when the gate is opened."""
    host.gate.clear()
    host.begun.clear()
    host.tell(EVERYTHING)
    await until(host.begun.is_set)
    host.now = OTHER


async def test_only_a_difference_makes_a_new_generation() -> None:
    host = FakeHost()
    inventory = inventory_of(host)
    assert inventory.snapshot.value == Snapshot()
    host.now = Snapshot()
    assert (first := await inventory.scan_now()).generation == 1, "the first scan counts even if it finds nothing"
    assert await inventory.scan_now() is first
    host.now = OTHER
    assert (await inventory.scan_now()).generation == first.generation + 1 == 2
    host.error = HardwareError("broken")
    with pytest.raises(HardwareError):
        await inventory.scan_now()
    assert inventory.snapshot.value.boot_id == "b"


@pytest.mark.parametrize("change", [EVERYTHING, PORT])
async def test_an_event_leads_to_a_scan_or_to_a_look_at_what_it_names(change: Change) -> None:
    host = FakeHost()
    inventory = inventory_of(host)
    inventory.rescan_soon("too early")
    async with running(inventory):
        host.now = OTHER
        await asyncio.to_thread(host.tell, change)
        await learns(inventory, "b")
        assert (host.scans, host.looks) == ((2, []) if change.everything else (1, [PORT]))
    assert host.watched.closed
    inventory.rescan_soon("too late")


@pytest.mark.parametrize("change", [EVERYTHING, PORT])
async def test_an_event_during_a_scan_is_looked_at_after_it(change: Change) -> None:
    host = FakeHost()
    inventory = inventory_of(host)
    async with running(inventory):
        await scan_that_hangs(host)
        host.tell(change)
        await asyncio.sleep(0.01)
        host.gate.set()
        await learns(inventory, "b")


async def test_a_scan_that_hangs_keeps_nobody_from_small_looks_and_takes_nothing_of_them_back() -> None:
    host = FakeHost()
    inventory = inventory_of(host)
    async with running(inventory):
        await scan_that_hangs(host)
        host.tell(PORT)
        await learns(inventory, "b")
        assert host.looks == [PORT]
        host.gate.set()
        await until(lambda: inventory.scans == 2)
        assert (inventory.snapshot.value.boot_id, host.looks) == ("b", [PORT, PORT])


async def test_what_happens_during_the_very_first_scan_is_looked_at_when_it_is_done() -> None:
    host = FakeHost()
    host.gate.clear()
    inventory = inventory_of(host)
    async with running(inventory, generation=0):
        await until(host.begun.is_set)
        host.now = OTHER
        host.tell(PORT)
        host.gate.set()
        await learns(inventory, "b")
        assert (host.scans, host.looks) == (1, [PORT])


async def test_a_burst_of_events_makes_few_scans_and_looks_and_none_is_lost() -> None:
    host = FakeHost()
    inventory = inventory_of(host)
    async with running(inventory):
        wanted = {f"0000:3b:00.{n}" for n in range(8)}
        for number in range(500):
            host.tell(of_function(f"0000:3b:00.{number % 8}"))
        await until(lambda: {f for look in host.looks for f in look.functions} == wanted)
        assert (len(host.looks) <= 3, host.scans) == (True, 1)
        for _ in range(500):
            host.tell(EVERYTHING)
        await until(lambda: host.scans >= 2)
        await asyncio.sleep(0.3)
        assert host.scans <= 3


@pytest.mark.parametrize("change", [EVERYTHING, PORT])
async def test_events_that_never_end_put_nothing_off_for_ever(change: Change) -> None:
    host = FakeHost()
    inventory = inventory_of(host)

    async def chatter() -> None:
        while True:
            host.tell(change)
            await asyncio.sleep(0.002)

    async with running(inventory):
        noise = asyncio.create_task(chatter())
        await until(lambda: host.scans + len(host.looks) >= 4)
        noise.cancel()


@pytest.mark.parametrize("heard", [True, False])
async def test_what_has_begun_is_followed_without_a_second_scan_if_the_kernel_was_heard(heard: bool) -> None:
    """A scan takes a good part of a start, and until its end kubelet refuses pods."""
    said: list[str | None] = []
    host = FakeHost(watch_error=None if heard else DriverUnavailable("no libudev"))
    inventory = inventory_of(host, complain=said.append)
    host.gate.clear()
    beginning = asyncio.create_task(inventory.begin())
    await until(host.begun.is_set)
    if heard:
        host.tell(PORT)
    host.gate.set()
    await beginning
    async with running(inventory):
        await until(lambda: host.looks == [PORT] if heard else host.scans == 2)
        assert host.scans == (1 if heard else 2)
        await until(lambda: said)
        assert said[-1] == (None if heard else "no libudev; changes are found by the timer alone, every 3600 s")


async def test_a_small_look_that_fails_makes_a_full_scan() -> None:
    host = FakeHost(look_error=HardwareError("broken"))
    inventory = inventory_of(host)
    async with running(inventory):
        host.now = OTHER
        host.tell(PORT)
        await learns(inventory, "b")


async def test_the_timer_finds_what_no_event_named_and_a_failing_scan_ends_nothing() -> None:
    host = FakeHost(error=HardwareError("broken"))
    inventory = inventory_of(host, 0.02)
    async with running(inventory, generation=0):
        await until(lambda: host.scans >= 2)
        host.error = None
        await learns(inventory, "a", than=0)
        host.now = OTHER
        await learns(inventory, "b")


async def test_events_that_could_not_be_heard_are_heard_later() -> None:
    """No descriptor was left at the start, say: a lost link must not take the timer's time for ever."""
    host = FakeHost(watch_error=DriverUnavailable("too many open files"))
    said: list[str | None] = []
    inventory = inventory_of(host, 0.05, complain=said.append)
    async with running(inventory):
        await until(lambda: host.scans >= 4)
        assert set(said) == {"too many open files; changes are found by the timer alone, every 0.05 s"}
        host.watch_error = None
        await until(lambda: said[-1] is None)
        inventory.rescan_seconds = 600
        await asyncio.sleep(0.2)
        host.now = OTHER
        host.tell(EVERYTHING)
        await learns(inventory, "b")
    assert host.watched.closed


async def test_a_watch_that_hears_a_part_is_kept_and_opened_again_with_the_timer() -> None:
    host = FakeHost()
    said: list[str | None] = []
    inventory = inventory_of(host, 0.3, complain=said.append, poll_seconds=0.01)
    async with running(inventory):
        await until(lambda: said)
        first, host.watched = host.watched, FakeWatch()
        first.unheard = ("uevents cannot be heard any more: gone",)
        await until(lambda: said[-1] is not None)
        assert str(said[-1]).startswith("uevents cannot be heard any more: gone; changes are found by the timer alone")
        assert not first.closed
        await until(lambda: first.closed and said[-1] is None)
    assert host.watched.closed


async def test_what_no_event_names_is_asked_for() -> None:
    host, polls = FakeHost(), 0

    def silent(snapshot: Snapshot) -> Change:
        nonlocal polls
        polls += 1
        return PORT if host.now.boot_id != snapshot.boot_id else NOTHING

    inventory = inventory_of(host, silent_changes=silent, poll_seconds=0.02)
    async with running(inventory):
        host.now = OTHER
        await learns(inventory, "b")
        looks, polls = len(host.looks), 0
        await until(lambda: polls >= 5)
        assert (host.scans, len(host.looks) - looks <= 1) == (1, True)


async def test_an_error_that_nobody_foresaw_ends_the_following_loudly() -> None:
    host = FakeHost(error=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await inventory_of(host).run()
    assert host.watched.closed


async def test_problems_are_logged_once_when_they_come_and_once_when_they_go(caplog: pytest.LogCaptureFixture) -> None:
    host = FakeHost()
    inventory, sound = inventory_of(host), host.now
    with caplog.at_level(logging.INFO, "agent.inventory"):
        for count in (1, 1, 0, 0, 1000):
            host.now = replace(sound, problems=tuple(Problem(f"/sys/{n}", "cannot be read") for n in range(count)))
            await inventory.scan_now()
            assert inventory.snapshot.value.problems == host.now.problems
    said = [record.getMessage() for record in caplog.records]
    assert said[:3] == ["scan: /sys/0 cannot be read", "scan: /sys/0 is readable again or gone", said[0]]
    assert (len(said), said[-1]) == (2 + 20 + 1, "scan: 980 more problems appeared")


TOPOLOGY = '<system><cpu numaid="0"><pci busid="ffff:ff:01.0"><pci busid="0001:00:00.0"/></pci></cpu></system>'


async def test_what_the_configuration_says_of_gpus_is_part_of_the_snapshot(tmp_path: Path) -> None:
    known = Places("a known one", (("0001:00:00.0", ("s", "s", "0001:00:00.0"), 0),))
    host, file = FakeHost(Snapshot(places=known)), tmp_path / "topo.xml"
    inventory = inventory_of(host)
    ids = (GpuNames("example.com/npu", "(?P<pci>.+)"),)
    inventory.heed(Placement(ids, file))
    assert (await inventory.scan_now()).gpu_ids == ids
    assert inventory.snapshot.value.places == known, "the node has no such file"
    file.write_text(TOPOLOGY)
    assert (await inventory.scan_now()).places.source == str(file)
    file.write_text("<html>")
    found = await inventory.scan_now()
    assert found.places == known
    assert [(p.path, "no topology file" in p.text) for p in found.problems] == [(str(file), True)]
    inventory.heed(Placement())
    assert await inventory.scan_now() == replace(found, gpu_ids=(), problems=())
