"""The wait for books that another agent has: an update starts the next agent before it ends the last one.

Who waits has done all that needs no books, says that it is ready, and has the books some milliseconds after the other
agent is gone. It opens no socket that others look for and writes no file before that. The DaemonSet ends the other
agent as soon as this one is ready; where nobody does, two agents were meant for one node, or one cannot end: so who
waits for long is no longer ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from agent.errors import LedgerError, LedgerInUse
from agent.ledger.database import NEXT_LOCK, is_locked, lock_folder, lock_holder
from agent.process.conditions import Conditions
from agent.process.identity import agent_version
from agent.state import first

POD = "NODEFABRIC_POD"
"""Variable that names the agent's own pod."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Times:
    """Times in seconds."""

    look: float = 0.02
    """Between two looks whether the books are free: pods are refused meanwhile."""
    patience: float = 600.0
    """After so long who waits is no longer ready. A DaemonSet's controller that was away must have seen it ready
    before: it ends the other agent only for one that is."""
    retry: float = 1.0
    """Between two looks after that, or while the folder cannot be used."""


DEFAULT_TIMES = Times()


async def claim_books(
    folder: Path,
    conditions: Conditions,
    stop: asyncio.Event,
    prepare: Callable[[], Awaitable[object]],
    times: Times = DEFAULT_TIMES,
) -> contextlib.ExitStack | None:
    """Make the books this process's alone, however long that takes. None if asked to stop meanwhile.

    The claim ends when what is returned is closed. `prepare` is awaited once if another agent has them, and then this
    one stands by.
    """
    loop, holder = asyncio.get_running_loop(), _description()
    since: float | None = None
    is_next = False
    with contextlib.ExitStack() as mine, contextlib.ExitStack() as turn:
        while not stop.is_set():
            pause = times.retry
            try:
                mine.callback(os.close, await asyncio.to_thread(lock_folder, folder, holder))
            except LedgerInUse as error:
                if since is None:
                    await prepare()
                    since = loop.time()
                    conditions.set("ledger", None)
                    other = lock_holder(folder) or "another agent"
                    conditions.stand_by(f"{other} serves this node; this agent takes over when that ends")
                is_next = is_next or _is_next(folder, turn)
                if loop.time() - since < times.patience:
                    pause = times.look
                else:
                    conditions.set(
                        "ledger",
                        f"{error}, and this one has waited for {times.patience / 60:.0f} minutes: delete the other"
                        " agent's pod if this one is to follow it, or this DaemonSet if there is one too many",
                    )
            except LedgerError as error:
                conditions.set("ledger", str(error))
            else:
                conditions.stand_by(None)
                conditions.set("ledger", None)
                return mine.pop_all()
            await first(stop.wait(), seconds=pause)
    return None


def has_successor(folder: Path) -> bool:
    """Return whether an agent waits for the books that this process has."""
    return is_locked(folder, NEXT_LOCK)


def _is_next(folder: Path, turn: contextlib.ExitStack) -> bool:
    """Show who has the books that somebody waits. One of several that wait is enough."""
    try:
        turn.callback(os.close, lock_folder(folder, name=NEXT_LOCK))
    except LedgerError as error:
        log.debug("%s", error)
        return False
    return True


def _description() -> str:
    """Say who this agent is, for the condition of an agent that waits for it."""
    pod = os.environ.get(POD)
    return f"{f'pod {pod}' if pod else f'process {os.getpid()}'}, version {agent_version()}"
