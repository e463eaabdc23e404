"""CDI specs are kept: those that somebody removes are written again, and what keeps them from that is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.errors import AgentError
from agent.report.report import Report
from cni.install.folder import LOOK_SECONDS, version_of

SPECS_SECONDS = 5.0
"""How soon CDI specs are written again that could not be."""
LONGEST_SECONDS = 60.0
"""Between two looks though no name has come or gone."""


class SpecWatch:
    """Watches the folder of CDI specs. `look` before anybody is served, then `run` until cancelled.

    Until a spec is back no container that names it starts.
    """

    def __init__(self, folder: Path, rewrite: Callable[[], Sequence[str]], report: Report) -> None:
        """`rewrite` writes those that are missing or say something else, and lists them. It blocks."""
        self._folder = folder
        self._rewrite = rewrite
        self._report = report
        self.problem: str | None = None
        """Why specs of ours are not written; None if they are."""

    async def look(self) -> None:
        """Write the specs that are missing, as far as that can be done."""
        try:
            written = await asyncio.to_thread(self._rewrite)
        except AgentError as error:
            self.problem, written = str(error), ()
        else:
            self.problem = None
        for _ in written:
            self._report.reconciled("spec-write", "mended")

    async def run(self) -> None:
        """Look at once and whenever a name has come or gone."""
        while True:
            before, waited = version_of(self._folder), 0.0
            await self.look()
            if self.problem is not None:
                before = version_of(self._folder)  # the attempt itself has changed it, and would be made without end
            most = LONGEST_SECONDS if self.problem is None else SPECS_SECONDS
            while version_of(self._folder) == before and waited < most:
                await asyncio.sleep(LOOK_SECONDS)
                waited += LOOK_SECONDS
