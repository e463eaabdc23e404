"""Events that name what changed: small looks beside full scans."""

from __future__ import annotations

import asyncio

from agent.errors import HardwareError
from agent.inventory import Inventory
from agent.model.change import NOTHING, Change, of_function
from agent.model.device import Snapshot
from tests.agent.scanned import DEADLINE, FakeHost, learns, looped, running, stopped
from tests.awaiting import until


@looped
async def test_an_event_that_names_a_function_leads_to_a_small_look() -> None:
    host = FakeHost()
    inventory = Inventory(host, 3600)
    task = await running(inventory)
    host.now = Snapshot(boot_id="b")
    inventory.rescan_soon("net change eth0", of_function("0000:3b:00.1"))
    await learns(inventory, "b")
    assert (host.scans, host.looks) == (1, [of_function("0000:3b:00.1")])
    assert inventory.updates == 1
    await stopped(task)


@looped
async def test_a_burst_about_many_functions_makes_few_looks() -> None:
    host = FakeHost()
    inventory = Inventory(host, 3600)
    task = await running(inventory)
    wanted = {f"0000:3b:00.{n}" for n in range(8)}
    for number in range(500):
        inventory.rescan_soon("", of_function(f"0000:3b:00.{number % 8}"))
    await until(lambda: {f for look in host.looks for f in look.functions} == wanted)
    assert len(host.looks) <= 3
    assert host.scans == 1
    await stopped(task)


@looped
async def test_a_small_look_does_not_wait_for_a_full_scan_and_outlives_it() -> None:
    host = FakeHost()
    inventory = Inventory(host, 3600)
    task = await running(inventory)
    host.gate.clear()
    host.begun.clear()
    inventory.rescan_soon("everything")
    await until(host.begun.is_set)  # this scan has read boot ID a
    host.now = Snapshot(boot_id="b")
    inventory.rescan_soon("net change eth0", of_function("0000:3b:00.1"))
    await learns(inventory, "b")
    assert inventory.scans == 1
    host.gate.set()
    await until(lambda: inventory.scans == 2)
    assert inventory.snapshot.value.boot_id == "b"
    assert host.looks == [of_function("0000:3b:00.1")] * 2  # looked at again, on top of the full scan
    await stopped(task)


@looped
async def test_what_happens_during_the_very_first_scan_is_looked_at_when_it_is_done() -> None:
    host = FakeHost()
    host.gate.clear()
    inventory = Inventory(host, 3600)
    task = asyncio.create_task(inventory.run())
    await until(host.begun.is_set)
    host.now = Snapshot(boot_id="b")
    inventory.rescan_soon("net change eth0", of_function("0000:3b:00.1"))
    await asyncio.sleep(0.2)
    host.gate.set()
    await learns(inventory, "b", than=0)
    assert host.scans == 1
    await stopped(task)


@looped
async def test_a_small_look_that_fails_makes_a_full_scan() -> None:
    host = FakeHost(look_error=HardwareError("broken"))
    inventory = Inventory(host, 3600)
    task = await running(inventory)
    host.now = Snapshot(boot_id="b")
    inventory.rescan_soon("net change eth0", of_function("0000:3b:00.1"))
    await learns(inventory, "b")
    await stopped(task)


@looped
async def test_what_was_said_before_the_start_does_not_deafen_it() -> None:
    host = FakeHost()
    inventory = Inventory(host, 3600)
    inventory.rescan_soon("too early")
    task = await running(inventory)
    host.now = Snapshot(boot_id="b")
    inventory.rescan_soon("net change eth0", of_function("0000:3b:00.1"))
    await learns(inventory, "b")
    await stopped(task)


@looped
async def test_what_no_event_tells_is_asked_for() -> None:
    host, polls = FakeHost(), 0

    def silent(snapshot: Snapshot) -> Change:
        nonlocal polls
        polls += 1
        return of_function("0000:3b:00.0") if host.now.boot_id != snapshot.boot_id else NOTHING

    inventory = Inventory(host, 3600, silent_changes=silent, poll_seconds=0.02)
    task = await running(inventory)
    host.now = Snapshot(boot_id="b")
    await learns(inventory, "b")
    async with asyncio.timeout(DEADLINE):
        looks = 0
        while looks != inventory.updates:  # once it was seen, there is nothing to look at
            looks, before = inventory.updates, polls
            await until(lambda n=before: polls >= n + 5)  # type: ignore[misc]
    assert host.scans == 1
    await stopped(task)
