"""What must be there before the agent can do anything, waited for however long that takes.

An agent that restarts in a loop explains nothing; one that waits says on its pages what it waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from agent.config import Config
from agent.errors import ConfigError, HardwareError, LedgerError
from agent.inventory import Inventory
from agent.ledger import Ledger
from agent.ledger.lock import claim
from agent.obstacles import Obstacles

RETRY_SECONDS = 1.0


async def learn_boot_id(inventory: Inventory, obstacles: Obstacles, root: Path, stop: asyncio.Event) -> str:
    """Scan until the boot ID can be read: without it every row would look like one of an earlier boot."""
    boot_id = inventory.snapshot.boot_id
    while not boot_id and not stop.is_set():
        try:
            boot_id = (await inventory.scan_now()).boot_id
        except HardwareError as error:
            obstacles.set("hardware", str(error))
        else:
            if boot_id:
                obstacles.set("hardware", None)
                break
            obstacles.set("hardware", f"{root}/proc/sys/kernel/random/boot_id cannot be read: mount /proc")
        await _pause(stop)
    return boot_id


async def open_ledger(
    config: Config, boot_id: str, obstacles: Obstacles, stop: asyncio.Event, stack: AsyncExitStack
) -> Ledger | None:
    """Open the books, which no other agent may have open. None if asked to stop meanwhile.

    The claim to them ends with `stack`; closing them is the caller's business.
    """
    claimed = False
    while not stop.is_set():
        try:
            if not claimed:
                stack.callback(os.close, await asyncio.to_thread(claim, config.state_dir))
                claimed = True
            ledger = await asyncio.to_thread(Ledger.open, config.ledger_path, boot_id)
        except LedgerError as error:
            obstacles.set("ledger", str(error))
            await _pause(stop)
        else:
            obstacles.set("ledger", None)
            return ledger
    return None


async def listen(start: Callable[[], None], obstacles: Obstacles, stop: asyncio.Event) -> None:
    """Have the socket for pods opened: `start` raises ConfigError while that is not possible, on a full /run say."""
    while not stop.is_set():
        try:
            await asyncio.to_thread(start)
        except ConfigError as error:
            obstacles.set("cni", str(error))
            await _pause(stop)
        else:
            obstacles.set("cni", None)
            return


async def keep_listening(stands: Callable[[], bool], again: Callable[[], None], obstacles: Obstacles) -> None:
    """Open the socket for pods again whenever it does not stand any more: no relay would ever find it."""
    while True:
        if not stands():
            obstacles.set("cni", "somebody has removed the socket: it is made anew")
            try:
                await asyncio.to_thread(again)
            except ConfigError as error:
                obstacles.set("cni", str(error))
            else:
                obstacles.set("cni", None)
        await asyncio.sleep(RETRY_SECONDS)


async def _pause(stop: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RETRY_SECONDS):
            await stop.wait()
