"""Somebody updates the agent while pods come, and agents die in the middle of that."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
from pathlib import Path

from agent.ledger.database import lock_folder
from agent.process.conditions import NO_POD_NEEDS, Conditions
from agent.process.standby import Times, claim_books, has_successor
from hack.sim.stage import Stage
from tests.awaiting import until
from tests.e2e.conftest import stage
from tests.hostile.updating import RESOURCES, Agents, DeadlyUpdates, Death, node, play

__all__ = ["stage"]
UPDATES = 3


def test_kubelet_is_without_our_resources_for_less_than_a_second_in_an_update(stage: Stage) -> None:
    stream = asyncio.run(play(stage, UPDATES))
    assert len(stream.gaps) == UPDATES
    assert statistics.median(stream.gaps) < 1.0
    assert {pod.reason for pod in stream.failed} <= {"UnexpectedAdmissionError"}
    assert stream.ran > len(stream.failed)


async def test_who_waits_is_ready_and_touches_nothing_of_the_agent_that_serves(stage: Stage) -> None:
    async with node(stage) as stream:
        agents = Agents(stage)
        serving = agents.start()
        await stream.until_offered()
        await asyncio.to_thread(agents.await_ready, serving)
        before = files(stage.folder)
        waiting = agents.start()
        await asyncio.to_thread(agents.await_ready, waiting)
        assert f"standing by: pod nodefabric/{serving}, version " in stage.log(waiting)
        assert files(stage.folder) == before
        assert agents.readiness(serving) == "ok"
        assert stage.status()["ready"]
        assert await asyncio.to_thread(agents.end, waiting) == 0
        assert files(stage.folder) == before
        assert [line for line in stage.log(waiting).splitlines() if " ERROR " in line or " WARNING " in line] == []
        assert stream.is_offered()


def test_whoever_is_killed_in_an_update_the_node_heals_and_nothing_is_held_twice_or_lost(stage: Stage) -> None:
    updates = DeadlyUpdates(stage)
    for death in (
        Death("old", "closing device plugins"),
        Death("new", "opened clean-up"),
        Death("old", "closed books"),
    ):
        updates.play(death)
    assert updates.finish() == []


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """List the sockets and files that others look for, each with what tells it from another one of its name."""
    places = [folder / "run", folder / "kubelet/device-plugins", folder / "cdi-specs", folder / "state"]
    found = [path for place in places for path in place.rglob("*") if path.name != "agent.next"]
    return {str(path): (path.stat().st_ino, path.stat().st_ctime_ns) for path in found if path.suffix != ".db-shm"}


async def test_an_update_to_a_wrong_configuration_leaves_the_node_with_its_devices(stage: Stage) -> None:
    """Also where the agent that still has the right one starts again meanwhile."""
    async with node(stage) as stream:
        agents = Agents(stage)
        good = stage.folder / "good.yaml"
        (stage.folder / "config.yaml").rename(good)
        stage.write_config({**RESOURCES, "resourcs": []})
        old = agents.start(config=good.name)
        await stream.until_offered()
        new = agents.start()
        await until(lambda: "is in use by another agent" in stage.log(new))
        assert "resourcs" in agents.readiness(new)
        assert stream.is_offered()

        await asyncio.to_thread(agents.end, old, signal.SIGKILL)
        await until(lambda: "no longer in the way: pods" in stage.log(new))
        agents.start(config=good.name)
        await stream.until_offered()


async def test_who_never_gets_the_books_is_not_ready_for_ever(tmp_path: Path) -> None:
    conditions = Conditions()
    prepared = asyncio.Event()
    lock, stop = lock_folder(tmp_path, "pod nodefabric/stuck, version 1"), asyncio.Event()

    async def prepare() -> None:
        prepared.set()

    times = Times(look=0.01, patience=0.5, retry=0.01)
    waiting = asyncio.create_task(claim_books(tmp_path, conditions, stop, prepare, times))
    await until(lambda: conditions.stands_by)
    assert prepared.is_set()
    assert conditions.first(besides=NO_POD_NEEDS) is None
    assert "pod nodefabric/stuck, version 1 serves this node" in conditions.known()["standby"]
    await until(lambda: has_successor(tmp_path))

    await until(lambda: conditions.first(besides=NO_POD_NEEDS) is not None)
    told = conditions.first(besides=NO_POD_NEEDS) or ""
    assert told.startswith(
        f"ledger: {tmp_path} is in use by another agent (pod nodefabric/stuck, version 1), and this one has waited"
    )

    os.close(lock)
    async with asyncio.timeout(60):
        claimed = await waiting
    assert claimed is not None
    assert not conditions.stands_by
    assert "ledger" not in conditions.found
    assert not has_successor(tmp_path)
    claimed.close()
    os.close(lock_folder(tmp_path))


def test_who_is_stopped_while_it_waits_ends_at_once(tmp_path: Path) -> None:
    async def prepare() -> None:
        return None

    async def scenario() -> None:
        stop = asyncio.Event()
        waiting = asyncio.create_task(claim_books(tmp_path, Conditions(), stop, prepare))
        await until(lambda: has_successor(tmp_path))
        stop.set()
        assert await waiting is None
        assert not has_successor(tmp_path)

    lock = lock_folder(tmp_path)
    try:
        asyncio.run(scenario())
    finally:
        os.close(lock)
