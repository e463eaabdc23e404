"""CDI specs are kept: those that somebody removes are written again, and what keeps them from that is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from agent.errors import AgentError
from agent.report.report import Report
from cni.install.folder import LOOK_SECONDS, version_of

SPECS_SECONDS = 5.0
"""How soon CDI specs are written again that could not be."""


class PoolLists(Protocol):
    """Whoever writes the specs of pools, with their lists. Belongs to the loop's thread."""

    @property
    def specs_problem(self) -> str | None:
        """Why the specs of pools are not as they should be."""

    def look_again(self) -> None:
        """Say that somebody may have removed some."""


class Specs(Protocol):
    """Whoever writes the specs of slots, or of claims. Blocks."""

    def rewrite(self) -> Sequence[str]:
        """Write those that are missing or say something else, and list them. Raises Unavailable and LedgerError."""


class SpecWatch:
    """Watches the folder of CDI specs. `run` until cancelled.

    The reconciler and the device plugins look at specs, too, in their own time: until one is back no container that
    names it starts.
    """

    def __init__(self, folder: Path, specs: Sequence[Specs], pools: PoolLists, report: Report) -> None:
        self._folder = folder
        self._specs = specs
        self._pools = pools
        self._report = report
        self._unwritten: str | None = None
        """Why specs of slots or claims are not written."""

    @property
    def problem(self) -> str | None:
        """What is wrong with specs of ours; None if nothing is."""
        problems = (self._unwritten, self._pools.specs_problem)
        return "; ".join(problem for problem in problems if problem is not None) or None

    async def run(self) -> None:
        """Write the specs that are missing, at once and whenever a name has come or gone."""
        while True:
            before, waited = version_of(self._folder), 0.0
            self._pools.look_again()
            try:
                written = await asyncio.to_thread(self._rewrite)
            except AgentError as error:
                self._unwritten, written = str(error), ()
            else:
                self._unwritten = None
            for _ in written:
                self._report.reconciled("spec-write", "mended")
            while version_of(self._folder) == before and (self._unwritten is None or waited < SPECS_SECONDS):
                await asyncio.sleep(LOOK_SECONDS)
                waited += LOOK_SECONDS

    def _rewrite(self) -> Sequence[str]:
        return [name for specs in self._specs for name in specs.rewrite()]
