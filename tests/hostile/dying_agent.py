"""The agent, killed at one of its parts: `python -m tests.hostile.dying_agent run …` with DIE_AT="MOMENT PART".

MOMENT is `opening` or `opened`, `closing` or `closed`: before or after that is done with the part. Without DIE_AT each
part is named on stderr as it is opened and closed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

from agent import main as composition
from agent.process.lifecycle import Part
from hack.sim.agent import main

DIE_AT = "DIE_AT"
MARK = "part:"


class DyingAgent(composition.Agent):
    """Dies as if it had been killed."""

    def _parts(self, stop: asyncio.Event) -> Iterator[Part]:
        for part in super()._parts(stop):
            yield replace(
                part, open=_around("open", part.name, part.open), close=_around("clos", part.name, part.close)
            )
            _pass("opened", part.name)


def _around(verb: str, name: str, work: Callable[[], Awaitable[object]] | None) -> Callable[[], Awaitable[object]]:
    async def done() -> None:
        _pass(f"{verb}ing", name)
        if work is not None:
            await work()
        if verb == "clos":
            _pass("closed", name)

    return done


def _pass(moment: str, name: str) -> None:
    if os.environ.get(DIE_AT) == f"{moment} {name}":
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"{MARK} {moment} {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    composition.Agent = DyingAgent  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
