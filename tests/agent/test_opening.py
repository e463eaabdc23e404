"""What the agent waits for at its start."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import cast

from agent.errors import HardwareError
from agent.inventory import Inventory
from agent.obstacles import Obstacles
from agent.opening import keep_listening, learn_boot_id, listen
from cni.attachment import Attachments
from cni.server import CniServer
from tests.agent.scanned import FakeHost
from tests.awaiting import until


def server_in(run: Path) -> CniServer:
    """Make a server that nobody asks anything."""
    return CniServer(
        run / "cni.sock",
        cast(Attachments, None),
        obstacle=lambda: None,
        observe=lambda command: contextlib.nullcontext(),
    )


def test_a_socket_that_cannot_be_made_is_told_and_waited_for(short_folder: Path) -> None:
    run = short_folder / "run"
    run.write_text("in the way")
    server = server_in(run)
    obstacles = Obstacles()

    async def scenario() -> None:
        waiting = asyncio.create_task(listen(server.start, obstacles, asyncio.Event()))
        await until(lambda: "cni" in obstacles.found)
        assert f"{run}/cni.sock: cannot be made: " in obstacles.found["cni"]
        run.unlink()
        await waiting
        assert "cni" not in obstacles.found
        assert (run / "cni.sock").is_socket()

    try:
        asyncio.run(scenario())
    finally:
        server.close()


def test_who_is_stopped_waits_no_longer(short_folder: Path) -> None:
    (short_folder / "run").write_text("in the way")
    server = server_in(short_folder / "run")
    obstacles = Obstacles()

    async def scenario() -> None:
        stop = asyncio.Event()
        waiting = asyncio.create_task(listen(server.start, obstacles, stop))
        await until(lambda: "cni" in obstacles.found)
        stop.set()
        await waiting

    asyncio.run(scenario())


def test_a_socket_that_somebody_removes_is_made_anew(short_folder: Path) -> None:
    run, obstacles = short_folder / "run", Obstacles()
    server = server_in(run)
    server.start()

    async def scenario() -> None:
        keeping = asyncio.create_task(keep_listening(server.stands, server.listen_anew, obstacles))
        shutil.rmtree(run)
        run.write_text("in the way")
        await until(lambda: f"{run}/cni.sock: cannot be made: " in obstacles.found.get("cni", ""))
        run.unlink()
        await until((run / "cni.sock").is_socket)
        await until(lambda: "cni" not in obstacles.found)
        keeping.cancel()

    try:
        asyncio.run(scenario())
    finally:
        server.close()


def test_a_node_that_cannot_be_read_is_told_and_waited_for() -> None:
    host, obstacles = FakeHost(error=HardwareError("/sys cannot be read: Too many open files")), Obstacles()

    async def scenario() -> None:
        waiting = asyncio.create_task(learn_boot_id(Inventory(host, 60), obstacles, Path("/"), asyncio.Event()))
        await until(lambda: "Too many open files" in obstacles.found.get("hardware", ""))
        host.error = None
        assert await waiting == "a"
        assert "hardware" not in obstacles.found

    asyncio.run(scenario())


def test_a_node_that_was_read_already_is_not_read_again() -> None:
    host = FakeHost()

    async def scenario() -> None:
        inventory = Inventory(host, 60)
        await inventory.begin()
        assert await learn_boot_id(inventory, Obstacles(), Path("/"), asyncio.Event()) == "a"

    asyncio.run(scenario())
    assert host.scans == 1
