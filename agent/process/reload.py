"""Follows the configuration's files, and puts each new version into effect.

A version is applied, refused (the former one stays), or the same in other words.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from agent.config import Config
from agent.config.files import WAITS, Sources, without_restart
from agent.errors import ConfigError
from agent.report.report import Report
from agent.state import Latest

POLL_SECONDS = 2.0
"""kubelet swaps a ConfigMap's folder within a minute or two of the change: nobody waits for these two seconds."""
LOOKS_UNTIL_AGAIN = 15
"""A version that was refused is tried again after so many looks: what was wrong may have been the node."""

log = logging.getLogger(__name__)


class Reloader:
    """Follows the files until cancelled."""

    def __init__(
        self,
        sources: Sources,
        config: Latest[Config],
        report: Report,
        check: Callable[[Config], None],
        apply: Callable[[], Awaitable[None]],
        *,
        publishes: bool,
    ) -> None:
        """`config` has the one in effect, which was just read, and gets each new one, on a thread that may block.

        `check` raises ConfigError for one that cannot be used on this node, and may block; `apply` waits until the
        newest is in effect. `publishes`: there is an API server, whose account was chosen at the start.
        """
        self._sources = sources
        self._config = config
        self._report = report
        self._check = check
        self._apply = apply
        self._publishes = publishes
        self._texts: Mapping[Path, object] | None = None
        self._looks_since = 0
        """Since the last version was refused."""
        self._outcome = ""

    async def run(self) -> None:
        """Look at the files every few seconds."""
        # The first look reads them: they may have changed since the configuration in effect was read.
        while True:
            await self.look()
            await asyncio.sleep(POLL_SECONDS)

    async def look(self) -> None:
        """Look once, and apply what is new."""
        texts = await asyncio.to_thread(self._sources.read)
        known = {path: text if isinstance(text, bytes) else str(text) for path, text in texts.items()}
        self._looks_since += 1
        is_same = known == self._texts
        if is_same and (self._outcome != "refused" or self._looks_since < LOOKS_UNTIL_AGAIN):
            return
        self._outcome, self._looks_since = await self._take(texts), 0
        if not (is_same and self._outcome == "refused") and (self._texts is not None or self._outcome != "unchanged"):
            self._report.metrics.reloaded(self._outcome)
        self._texts = known

    async def _take(self, texts: Mapping[Path, bytes | ConfigError]) -> str:
        say = partial(self._report.conditions.set, "config")
        try:
            read = await asyncio.to_thread(self._sources.load, texts)
            also = ("topology",) if not self._publishes and read.topology.needs_api else ()
            config, waiting = without_restart(self._config.value, read, also)
            await asyncio.to_thread(self._check, config)
        except ConfigError as error:
            say(f"the new configuration is refused, and the former one stays in effect: {'; '.join(error.problems)}")
            return "refused"
        say(f"{WAITS} {', '.join(waiting)}" if waiting else None)
        if config == self._config.value and not waiting:
            return "unchanged"
        await asyncio.to_thread(self._config.set, config)
        await self._apply()
        for warning in read.warnings:
            log.warning("%s: %s", read.source, warning)
        if waiting:
            return "partly"
        log.info("the new configuration is in effect")
        return "applied"
