"""Full scans on events and on the timer, and who waits for them."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config import Placement
from agent.errors import DriverUnavailable, HardwareError
from agent.inventory import Inventory
from agent.model.change import EVERYTHING, of_function
from agent.model.cloud_topology import Places
from agent.model.device import Problem, Snapshot
from agent.model.gpu_ids import GpuIds
from tests.agent.scanned import DEADLINE, FakeHost, FakeWatch, learns, looped, running, stopped
from tests.awaiting import until


def test_before_the_first_scan_there_is_an_empty_generation_zero() -> None:
    assert Inventory(FakeHost(), 60).snapshot.value == Snapshot()
    assert Inventory(FakeHost(), 60).snapshot.value.generation == 0


@looped
async def test_the_first_scan_counts_even_if_it_finds_nothing() -> None:
    inventory = Inventory(FakeHost(Snapshot()), 60)
    assert (await inventory.scan_now()).generation == 1
    assert (inventory.scans, inventory.scan_seconds >= 0) == (1, True)


@looped
async def test_only_a_difference_makes_a_new_generation() -> None:
    host = FakeHost()
    inventory = Inventory(host, 60)
    first = await inventory.scan_now()
    assert await inventory.scan_now() is first
    host.now = Snapshot(boot_id="b")
    second = await inventory.scan_now()
    assert (second.generation, second.boot_id) == (2, "b")
    assert inventory.snapshot.value is second


@looped
async def test_a_scan_that_began_before_the_call_does_not_answer_it() -> None:
    host = FakeHost()
    inventory = Inventory(host, 60)
    host.gate.clear()
    early = asyncio.create_task(inventory.scan_now())
    await until(host.begun.is_set)
    host.now = Snapshot(boot_id="b")
    calls = [asyncio.create_task(inventory.scan_now()) for _ in range(10)]
    await asyncio.sleep(0)
    host.gate.set()
    async with asyncio.timeout(DEADLINE):
        assert (await early).boot_id == "a"
        assert {s.boot_id for s in await asyncio.gather(*calls)} == {"b"}
    assert host.scans == 2


@looped
async def test_a_failed_scan_keeps_the_snapshot_and_tells_the_caller() -> None:
    host = FakeHost()
    inventory = Inventory(host, 60)
    first = await inventory.scan_now()
    host.error = HardwareError("broken")
    with pytest.raises(HardwareError):
        await inventory.scan_now()
    assert inventory.snapshot.value is first


@looped
async def test_a_caller_behind_a_failed_scan_gets_a_scan_of_its_own() -> None:
    host = FakeHost(error=HardwareError("broken"))
    inventory = Inventory(host, 60)
    host.gate.clear()
    calls = [asyncio.create_task(inventory.scan_now()) for _ in range(3)]
    await until(host.begun.is_set)
    host.gate.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(r) for r in results] == [HardwareError] * 3


@looped
async def test_an_event_leads_to_a_scan() -> None:
    host = FakeHost()
    inventory = Inventory(host, 3600)
    task = await running(inventory)
    host.now = Snapshot(boot_id="b")
    assert host.on_event is not None
    threading.Thread(target=host.on_event, args=("events were lost", EVERYTHING)).start()
    await learns(inventory, "b")
    await stopped(task)
    assert host.watched.closed


@looped
async def test_a_burst_of_events_makes_few_scans() -> None:
    host = FakeHost()
    inventory = Inventory(host, 3600)
    task = await running(inventory)
    for _ in range(500):
        inventory.rescan_soon("net add eth0")
    await until(lambda: host.scans >= 2)
    await asyncio.sleep(0.3)
    assert host.scans <= 3
    await stopped(task)


@looped
async def test_events_that_never_end_do_not_put_the_scan_off_for_ever() -> None:
    host = FakeHost()
    inventory = Inventory(host, 3600)
    task = await running(inventory)

    async def chatter() -> None:
        while True:
            inventory.rescan_soon()
            await asyncio.sleep(0.002)

    noise = asyncio.create_task(chatter())
    await until(lambda: host.scans >= 4)
    noise.cancel()
    await stopped(task)


@looped
async def test_an_event_during_a_scan_leads_to_another() -> None:
    host = FakeHost()
    inventory = Inventory(host, 3600)
    task = await running(inventory)
    host.gate.clear()
    host.begun.clear()
    inventory.rescan_soon()
    await until(host.begun.is_set)
    host.now = Snapshot(boot_id="b")
    inventory.rescan_soon()
    await asyncio.sleep(0.01)
    host.gate.set()
    await learns(inventory, "b")
    await stopped(task)


@looped
async def test_what_has_begun_is_followed_without_a_second_scan() -> None:
    """A scan takes a good part of a start, and until its end kubelet refuses pods."""
    host = FakeHost()
    inventory = Inventory(host, 3600)
    assert (await inventory.begin()).generation == 1
    assert host.on_event is not None
    host.on_event("link eth0 changed", of_function("0000:3b:00.0"))
    task = asyncio.create_task(inventory.run())
    await until(lambda: host.looks != [])
    assert host.looks == [of_function("0000:3b:00.0")]
    assert host.scans == 1
    host.now = Snapshot(boot_id="b")
    host.on_event("events were lost", EVERYTHING)
    await learns(inventory, "b")
    assert host.scans == 2
    await stopped(task)
    assert host.watched.closed


@looped
async def test_who_begins_hears_the_kernel_before_it_looks() -> None:
    host = FakeHost()
    host.gate.clear()
    inventory = Inventory(host, 3600)
    beginning = asyncio.create_task(inventory.begin())
    await until(host.begun.is_set)
    assert host.on_event is not None
    host.gate.set()
    await beginning
    host.now = Snapshot(boot_id="b")
    assert (await inventory.begin()).boot_id == "b"
    await inventory.close()
    assert host.watched.closed


@looped
async def test_who_could_not_hear_at_the_beginning_scans_again() -> None:
    said: list[str | None] = []
    host = FakeHost(watch_error=DriverUnavailable("no libudev"))
    inventory = Inventory(host, 3600, complain=said.append)
    await inventory.begin()
    task = asyncio.create_task(inventory.run())
    await until(lambda: host.scans == 2)
    assert said == ["no libudev; changes are found by the timer alone, every 3600 s"]
    await stopped(task)


@looped
async def test_the_timer_finds_what_no_event_told() -> None:
    host = FakeHost(watch_error=DriverUnavailable("no libudev"))
    inventory = Inventory(host, 0.05)
    task = await running(inventory)
    host.now = Snapshot(boot_id="b")
    await learns(inventory, "b")
    await stopped(task)


@looped
async def test_events_that_could_not_be_heard_are_heard_later() -> None:
    """No descriptor was left at the start, say: a lost link must not take the timer's time for ever."""
    host = FakeHost(watch_error=DriverUnavailable("too many open files"))
    said: list[str | None] = []
    inventory = Inventory(host, 0.05, complain=said.append)
    task = await running(inventory)
    await until(lambda: host.scans >= 4)
    assert set(said) == {"too many open files; changes are found by the timer alone, every 0.05 s"}
    host.watch_error = None
    await until(lambda: host.on_event is not None)
    inventory.rescan_seconds = 600
    assert host.on_event is not None
    await until(lambda: said[-1] is None)
    await asyncio.sleep(0.2)
    host.now = Snapshot(boot_id="b")
    host.on_event("link eth0 changed", EVERYTHING)
    await learns(inventory, "b")
    await stopped(task)
    assert host.watched.closed


@looped
async def test_a_watch_that_hears_a_part_is_kept_and_opened_anew_with_the_timer() -> None:
    host = FakeHost()
    said: list[str | None] = []
    inventory = Inventory(host, 0.3, complain=said.append, poll_seconds=0.01)
    task = await running(inventory)
    await until(lambda: said)
    first = host.watched
    host.watched = FakeWatch()
    first.unheard = ("uevents cannot be heard any more: gone",)
    await until(lambda: said[-1] is not None)
    assert str(said[-1]).startswith("uevents cannot be heard any more: gone; changes are found by the timer alone")
    assert not first.closed
    await until(lambda: first.closed and said[-1] is None)
    await stopped(task)
    assert host.watched.closed


@looped
async def test_a_failing_scan_does_not_end_the_following() -> None:
    host = FakeHost(error=HardwareError("broken"))
    inventory = Inventory(host, 0.02)
    task = asyncio.create_task(inventory.run())
    await until(lambda: host.scans >= 2)
    host.error = None
    await learns(inventory, "a", than=0)
    await stopped(task)


@looped
async def test_an_error_that_nobody_foresaw_ends_the_following_loudly() -> None:
    host = FakeHost(error=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await Inventory(host, 60).run()
    assert host.watched.closed


def test_events_after_the_end_are_harmless() -> None:
    inventory = Inventory(FakeHost(), 60)

    async def scenario() -> None:
        await stopped(await running(inventory))

    asyncio.run(scenario())
    inventory.rescan_soon("too late")


def test_a_problem_is_logged_once_when_it_comes_and_once_when_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        host = FakeHost()
        inventory = Inventory(host, 60)
        sound = host.now
        host.now = replace(sound, problems=(Problem("/sys/class/net/eth0/mtu", "cannot be read: EIO"),))
        for _ in range(3):
            await inventory.scan_now()
        assert inventory.snapshot.value.problems == host.now.problems
        host.now = sound
        for _ in range(3):
            await inventory.scan_now()

    with caplog.at_level(logging.INFO, "agent.inventory"):
        asyncio.run(scenario())
    assert [r.getMessage() for r in caplog.records] == [
        "scan: /sys/class/net/eth0/mtu cannot be read: EIO",
        "scan: /sys/class/net/eth0/mtu is readable again or gone",
    ]


def test_a_flood_of_problems_is_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    host = FakeHost(Snapshot(problems=tuple(Problem(f"/sys/{n}", "is broken") for n in range(1000))))
    with caplog.at_level(logging.INFO, "agent.inventory"):
        asyncio.run(Inventory(host, 60).scan_now())
    assert len(caplog.records) == 21
    assert "980 more problems" in caplog.records[-1].getMessage()


@looped
async def test_a_slow_scan_does_not_stop_the_loop() -> None:
    host = FakeHost()
    host.gate.clear()
    scan = asyncio.create_task(Inventory(host, 60).scan_now())
    await until(host.begun.is_set)
    await asyncio.sleep(0.01)
    assert not scan.done()
    host.gate.set()
    await scan


TOPOLOGY = '<system><cpu numaid="0"><pci busid="ffff:ff:01.0"><pci busid="0001:00:00.0"/></pci></cpu></system>'


@looped
async def test_what_the_configuration_says_of_gpus_is_part_of_the_snapshot(tmp_path: Path) -> None:
    host, file = FakeHost(), tmp_path / "topo.xml"
    inventory = Inventory(host, 60)
    ids = (GpuIds("example.com/npu", "(?P<pci>.+)"),)
    inventory.heed(Placement(ids, file))
    assert (await inventory.scan_now()).gpu_ids == ids
    assert inventory.snapshot.value.places == Places(), "the node has no such file"
    file.write_text(TOPOLOGY)
    assert (await inventory.scan_now()).places.source == str(file)
    file.write_text("<html>")
    found = await inventory.scan_now()
    assert found.places == Places()
    assert [(p.path, "no topology file" in p.text) for p in found.problems] == [(str(file), True)]
    inventory.heed(Placement())
    assert await inventory.scan_now() == replace(found, gpu_ids=(), problems=())


@looped
async def test_the_table_of_a_known_instance_stays_where_there_is_no_file(tmp_path: Path) -> None:
    known = Places("a known one", (("0001:00:00.0", ("s", "s", "0001:00:00.0"), 0),))
    inventory = Inventory(FakeHost(Snapshot(places=known)), 60)
    inventory.heed(Placement(topology_file=tmp_path / "none.xml"))
    assert (await inventory.scan_now()).places == known
