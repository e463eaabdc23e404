"""What the agent waits for at its start."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from agent.errors import HardwareError
from agent.process.conditions import Conditions
from agent.process.startup import keep_listening, learn_boot_id, listen
from cni.attachment import Attachments
from cni.server import CniServer
from tests.agent.scanned import FakeHost, inventory_of
from tests.awaiting import until


def server_in(run: Path) -> CniServer:
    """Make a server that nobody asks anything."""
    return CniServer(
        run / "cni.sock",
        cast(Attachments, SimpleNamespace(add=None, delete=None)),
        condition=lambda: None,
        observe=lambda command: contextlib.nullcontext(),
    )


async def test_who_is_stopped_waits_no_longer(short_folder: Path) -> None:
    (short_folder / "run").write_text("in the way")
    server = server_in(short_folder / "run")
    conditions = Conditions()
    stop = asyncio.Event()
    waiting = asyncio.create_task(listen(server.start, conditions, stop))
    await until(lambda: "cni" in conditions.found)
    stop.set()
    await waiting


def test_a_socket_that_somebody_removes_is_made_anew(short_folder: Path) -> None:
    run, conditions = short_folder / "run", Conditions()
    server = server_in(run)
    server.start()

    async def scenario() -> None:
        keeping = asyncio.create_task(keep_listening(server.stands, server.listen_again, conditions))
        shutil.rmtree(run)
        run.write_text("in the way")
        await until(lambda: f"{run}/cni.sock: cannot be made: " in conditions.found.get("cni", ""))
        run.unlink()
        await until((run / "cni.sock").is_socket)
        await until(lambda: "cni" not in conditions.found)
        keeping.cancel()

    try:
        asyncio.run(scenario())
    finally:
        server.close()


async def test_a_node_that_cannot_be_read_is_told_and_waited_for() -> None:
    host, conditions = FakeHost(error=HardwareError("/sys cannot be read: Too many open files")), Conditions()
    waiting = asyncio.create_task(learn_boot_id(inventory_of(host), conditions, Path("/"), asyncio.Event()))
    await until(lambda: "Too many open files" in conditions.found.get("hardware", ""))
    host.error = None
    assert await waiting == "a"
    assert "hardware" not in conditions.found
